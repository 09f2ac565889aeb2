"""The table of federated learning methods by name. Each method has a file or a folder in this package."""

from typing import Any

from raylt.config import check
from raylt.core.method import Method
from raylt.errors import UnknownMethod, did_you_mean, spoken
from raylt.methods.apfl import APFL
from raylt.methods.balancefl import BalanceFL
from raylt.methods.bpfed.method import BPFed
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fed3r import Fed3R
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.methods.classifiers.fednpc import FedNPC
from raylt.methods.classifiers.means import NoisyMeans
from raylt.methods.classifiers.oracle import Oracle
from raylt.methods.classifiers.posthoc import PostHoc
from raylt.methods.creff.clip2fl import CLIP2FL
from raylt.methods.creff.method import CReFF
from raylt.methods.ditto import Ditto
from raylt.methods.fedafa import FedAFA
from raylt.methods.fedala import FedALA
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedavgm import FedAvgM
from raylt.methods.fedbabu import FedBABU
from raylt.methods.fedbn import FedBN
from raylt.methods.feddecorr import FedDecorr
from raylt.methods.feddyn import FedDyn
from raylt.methods.fedetf import FedETF
from raylt.methods.fedfocal import FedFocal
from raylt.methods.fedgrab import FedGraB
from raylt.methods.fedic import FEDIC
from raylt.methods.fedlc import FedLC
from raylt.methods.fedloge import FedLoGe
from raylt.methods.fednh import FedNH
from raylt.methods.fednova import FedNova
from raylt.methods.fedntd import FedNTD
from raylt.methods.fedopt import FedAdam, FedYogi
from raylt.methods.fedper import FedPer
from raylt.methods.fedproto import FedProto
from raylt.methods.fedprox import FedProx
from raylt.methods.fedrela import FedReLa
from raylt.methods.fedrep import FedRep
from raylt.methods.fedrod import FedRoD
from raylt.methods.fedrs import FedRS
from raylt.methods.fedsm.method import FedSM
from raylt.methods.fedyoyo import FedYoYo
from raylt.methods.flea import FLea
from raylt.methods.la import LogitAdjustment
from raylt.methods.local import Local
from raylt.methods.moon import MOON
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.pfedme import PFedMe
from raylt.methods.promptfl import PromptFL
from raylt.methods.qfedavg import QFedAvg
from raylt.methods.ratioloss import RatioLoss
from raylt.methods.rucr import RUCR
from raylt.methods.scaffold import Scaffold
from raylt.methods.sfd.method import SFD

METHODS: dict[str, type[Method]] = {
    FedAvg.name: FedAvg,
    FedProx.name: FedProx,
    FedPer.name: FedPer,
    FedNova.name: FedNova,
    Scaffold.name: Scaffold,
    FedAvgM.name: FedAvgM,
    FedAdam.name: FedAdam,
    FedYogi.name: FedYogi,
    QFedAvg.name: QFedAvg,
    Ditto.name: Ditto,
    FedRep.name: FedRep,
    FedRoD.name: FedRoD,
    Local.name: Local,
    MOON.name: MOON,
    FedDecorr.name: FedDecorr,
    FedLC.name: FedLC,
    FedFocal.name: FedFocal,
    RatioLoss.name: RatioLoss,
    BalanceFL.name: BalanceFL,
    FedAFA.name: FedAFA,
    CReFF.name: CReFF,
    CLIP2FL.name: CLIP2FL,
    CCVR.name: CCVR,
    FedNCM.name: FedNCM,
    Fed3R.name: Fed3R,
    NoisyMeans.name: NoisyMeans,
    Oracle.name: Oracle,
    LogitAdjustment.name: LogitAdjustment,
    PostHoc.name: PostHoc,
    FedNPC.name: FedNPC,
    RUCR.name: RUCR,
    FedLoGe.name: FedLoGe,
    FLea.name: FLea,
    FedETF.name: FedETF,
    FedGraB.name: FedGraB,
    FedReLa.name: FedReLa,
    FedYoYo.name: FedYoYo,
    FedRS.name: FedRS,
    FedBN.name: FedBN,
    FedNTD.name: FedNTD,
    FedDyn.name: FedDyn,
    FedBABU.name: FedBABU,
    FedProto.name: FedProto,
    APFL.name: APFL,
    PFedMe.name: PFedMe,
    FedALA.name: FedALA,
    FedNH.name: FedNH,
    FEDIC.name: FEDIC,
    PromptFL.name: PromptFL,
    SFD.name: SFD,
    BPFed.name: BPFed,
    MuPFL.name: MuPFL,
    FedSM.name: FedSM,
}


def make_method(settings: dict[str, Any]) -> Method:
    """Return the method that `settings["name"]` names, constructed with the other settings as its fields.

    Raises:
        UnknownMethod: The method is unknown.
        ConfigError: A field is unknown, of the wrong type or out of range.
    """
    name = settings["name"]
    if name not in METHODS:
        raise UnknownMethod(
            f"method: unknown method ({name!r}). {did_you_mean(name, METHODS)}"
            f"Give one of: {', '.join(METHODS)}; or "
            f"{spoken('--plugin FILE with your own', 'your own by raylt.register')}.",
            code="config.unknown-name",
            key="method",
            value=name,
            allowed=list(METHODS),
        )
    fields = {key: value for key, value in settings.items() if key != "name"}
    return check(METHODS[name], fields, prefix="method.")
