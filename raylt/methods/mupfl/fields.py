"""The fields of MuPFL, and the models that a client can be judged by. Departures [n] are listed in method.py."""

from typing import ClassVar, Literal

from raylt.core.method import Method
from raylt.hyper import Choice, LogUniform, Uniform, hp

# a client's models: u of w~_i with own v_i; w_i after local training; Eq. 14's w~_i; u_glo with own v_i, 3.5; w_glo
Model = Literal["cluster", "post_local", "whole", "deploy", "global"]
MODELS: tuple[Model, ...] = ("cluster", "post_local", "whole", "deploy", "global")


class Fields(Method):
    """What can be set of MuPFL."""

    link: ClassVar[str | None] = "https://arxiv.org/abs/2405.06413"

    bavd: bool = hp(True, Choice(True, False), "biased activation value dropout, 3.3, Table 6")
    bavd_layers: Literal["last", "all"] | tuple[str, ...] = hp("last", Choice("last", "all"), "stages it is behind")
    bavd_map: Literal["chw", "hw", "bchw"] = hp("chw", Choice("chw", "hw", "bchw"), "what M is over, Eq. 6")
    bavd_psi: Literal["intended", "equation"] = hp("intended", Choice("intended", "equation"), "sign of psi, Eq. 6")
    bavd_threshold: Literal["channel", "whole"] = hp("channel", Choice("channel", "whole"), "the mean of M that its "
                                                     "values are compared with, 3.6")
    bavd_reset: Literal["epoch", "round", "never"] = hp("epoch", Choice("epoch", "round", "never"), "when M starts "
                                                        "anew, 3.3")
    bavd_judged: bool = hp(False, Choice(False, True), "what is dropped stays dropped when judged; not stated")
    acmu: bool = hp(True, Choice(True, False), "clusters, 3.4, Table 6")
    alpha: float = hp(0.5, Uniform(0.0, 1.0), "share of updates, not maps, in Eq. 8; not stated", ge=0, le=1)
    kappa: int | None = hp(None, Choice(None, 2, 3, 4, 5, 6), "fixed number of clusters, Table 5; None: Eq. 13", ge=1)
    kappa_max: int = hp(6, Choice(4, 6, 8), "most clusters, Eq. 13, Table 5", ge=2)
    clustered: Literal["participants", "all"] = hp("participants", Choice("participants", "all"), "whose last updates "
                                                   "form clusters, Table 5")
    updates: Literal["received", "tuned"] = hp("received", Choice("received", "tuned"), "an update starts from the "
                                               "model that came, or from it with the tuned classifier, Eq. 7")
    pkcf: bool = hp(True, Choice(True, False), "classifiers tuned on federated features, 3.5, Table 6")
    m: int = hp(100, Choice(10, 50, 100, 150, 200), "federated features per class, Eq. 19, 4.1", ge=1)
    tau: int = hp(50, Choice(10, 50, 100), "epochs of tuning, Eq. 21, 4.1", ge=0)
    gradients: Literal["local", "global"] = hp("local", Choice("local", "global"), "model of Eq. 16: the client's "
                                               "after training, or the one received, before it (CReFF)")
    distance: Literal["flat", "rows"] = hp("flat", Choice("flat", "rows"), "Eq. 20; or row by row (CReFF)")
    matching_steps: int = hp(100, Choice(50, 100, 300), "of SGD on Eq. 20; from CReFF's code", ge=0)
    matching_lr: float = hp(100.0, LogUniform(0.1, 1000), "of SGD on Eq. 20; not stated", gt=0)
    next_init: Literal["classifier", "cluster", "own", "global"] = hp(
        "classifier", Choice("classifier", "cluster", "own", "global"), "what the next round starts from: u_glo and "
        "own v_i, 3.5; w~_i, Eq. 14; w_i, Algorithm 1; w_glo")
    last_update: bool = hp(False, Choice(False, True), "all clients train once more before they are judged in the end")
    judged: Model = hp("cluster", Choice(*MODELS), "a client's model: u of w~_i with own v_i; w_i after local "
                       "training; Eq. 14's w~_i; u_glo with own v_i, 3.5; w_glo")
