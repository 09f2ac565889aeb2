"""The methods, one file each."""

import difflib
from typing import Any

from raylt.config import check
from raylt.core.method import Method
from raylt.errors import UnknownMethod
from raylt.methods.balancefl import BalanceFL
from raylt.methods.bpfed.method import BPFed
from raylt.methods.ccvr import CCVR
from raylt.methods.creff import CReFF
from raylt.methods.ditto import Ditto
from raylt.methods.fed3r import Fed3R
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedavgm import FedAvgM
from raylt.methods.feddecorr import FedDecorr
from raylt.methods.fedfocal import FedFocal
from raylt.methods.fedlc import FedLC
from raylt.methods.fedncm import FedNCM
from raylt.methods.fednova import FedNova
from raylt.methods.fedopt import FedAdam, FedYogi
from raylt.methods.fedper import FedPer
from raylt.methods.fedprox import FedProx
from raylt.methods.fedrep import FedRep
from raylt.methods.fedrod import FedRoD
from raylt.methods.fedsm.method import FedSM
from raylt.methods.local import Local
from raylt.methods.moon import MOON
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.qfedavg import QFedAvg
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
    BalanceFL.name: BalanceFL,
    CReFF.name: CReFF,
    CCVR.name: CCVR,
    FedNCM.name: FedNCM,
    Fed3R.name: Fed3R,
    SFD.name: SFD,
    BPFed.name: BPFed,
    MuPFL.name: MuPFL,
    FedSM.name: FedSM,
}


def make_method(settings: dict[str, Any]) -> Method:
    """The method that a configuration's `method` names, with its fields.

    Raises:
        UnknownMethod: no such name.
        ConfigError: no such field, wrong type or out of range.
    """
    name = settings["name"]
    if name not in METHODS:
        nearest = difflib.get_close_matches(name, METHODS, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise UnknownMethod(f"method = {name!r}: no such method{hint} There are: {', '.join(METHODS)}.")
    fields = {key: value for key, value in settings.items() if key != "name"}
    return check(METHODS[name], fields, prefix="method.")
