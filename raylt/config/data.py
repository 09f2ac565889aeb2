"""`DataConfig`: which data, how they are made long-tailed and who gets what."""

from typing import Any, Literal

from pydantic import model_validator

from raylt.config.section import LAST_SEED, MOST, Section, setting

BENCHMARKS = ("digits", "cifar10", "cifar100", "fashion_mnist", "cinic10", "imagenet_lt", "shapes", "camvid",
              "cityscapes")
USUAL = {"imbalance": 20.0, "partition": "dirichlet", "clients": 10}       # of benchmarks


class DataConfig(Section):
    """Which data, how it is made long-tailed and who gets what.

    What is None here follows from the data: one's own bring their clients and their long tail with them. Of a benchmark
    nothing is None but `test`.
    """

    source: str = setting("digits", "The data set. Those from shapes on, and npz:PATH, have label maps.",
                          "digits, cifar10, cifar100, fashion_mnist, cinic10, imagenet_lt, shapes, camvid, cityscapes, "
                          "folder:PATH, npz:PATH, hf:NAME@REVISION, hf:PATH, or one's own")
    root: str = setting("data", "The folder that holds the data sets and the cache of decoded images.")
    download: bool = setting(False, "Whether torchvision may fetch a data set that is not under data.root.")
    size: int = setting(224, "The side in pixels to which trees of image files (folder:, imagenet_lt) are decoded; for "
                        "camvid and cityscapes it is the height.", ge=8, le=8192)
    image_column: str | None = setting(None, "Of hf:, the column of images; null is the one that has images.")
    label_column: str | None = setting(None, "Of hf:, the column of classes; null is the one that names its classes.")
    client_column: str | None = setting(None, "Of hf:, the column that says whose each image is; null is none.")
    channels: Literal["auto", 1, 3] = setting("auto", "Of folder: and hf:, 1 for grey, 3 for colour; auto is grey "
                                              "where all images are.")
    fit: Literal["crop", "pad"] = setting("crop", "How such an image becomes a square: crop keeps its centre, "
                                          "pad all of it with black beside.")
    bad: Literal["stop", "skip"] = setting("stop", "Whether such images that cannot be decoded end the run, all "
                                           "named, or are left out and counted.")
    imbalance: float | None = setting(
        None, "How many times more samples the first class, of one's own data the largest, has than the last "
        "(IF); 1 keeps the data as they are. With label maps it compares the first client with the last. Null is 20 "
        "for benchmarks and 1 for one's own data and imagenet_lt: nothing of those is left out unasked.", ge=1, le=MOST)
    tail: Literal["global", "local", "mixed"] = setting(
        "global", "What is long-tailed by data.imbalance: the training samples of all clients together; each client's "
        "own, its classes in an order of its own; or both.")
    partition: Literal["creff", "dirichlet", "dirichlet_min", "hsu", "iid", "by_id", "classes", "pathological",
                       "shards", "quantity"] | None = setting(
        None, "How the training samples are dealt to the clients. Null is by_id where one's own data record whose each "
        "image is, and dirichlet elsewhere.")
    per_client: int = setting(2, "With data.partition=pathological, how many classes a client holds; with shards, how "
                              "many of the shards it gets.", ge=1, le=MOST)
    beta: int = setting(1, "With data.partition=classes, how many classes of the label maps a client keeps; all others "
                        "are erased from its maps.", ge=1, le=MOST)
    erased: Literal["background", "unlabelled"] = setting(
        "background", "What the pixels of an erased class become: of one further class, or without a label, as FedSeg "
        "has it.")
    alpha: float = setting(0.5, "The concentration of the Dirichlet draws: the smaller, the more the clients differ.",
                           gt=0, le=MOST)
    min_size: int | None = setting(None, "How many samples every client gets at least; null stands for 0 with "
                                   "dirichlet and for 10 with dirichlet_min.", ge=0, le=MOST)
    clients: int | None = setting(None, "How many clients there are (K). Null is as many as the data record with "
                                  "by_id, and 10 elsewhere.", ge=1, le=MOST)
    new_clients: int = setting(0, "How many of the clients, drawn at random, join only after training: they take "
                               "part in nothing before, and are judged apart.", ge=0, le=MOST)
    test: float | None = setting(None, "The share of each client's images that it is judged by and not trained on, "
                                 "where the data name clients and have no test part; null is 0.2 there.",
                                 gt=0, lt=1)
    seed: int = setting(0, "The seed of the long-tailed subset and of the partition.", ge=0, le=LAST_SEED)
    split: str | None = setting(None, "The path of a split.json to use; null draws a new split.")
    normalise: bool = setting(True, "Whether pixels are brought to mean 0 and deviation 1 per channel; otherwise they "
                              "lie in 0..1.")
    validation: float = setting(0.0, "The share of each class's training samples that no client gets, so that a search "
                                "can judge on them.", ge=0, lt=1)
    auxiliary: int = setting(0, "How many training images of each class the server holds itself, for methods that need "
                             "some (ratioloss): those that no client has, then copies of clients' images.", ge=0,
                             le=MOST)
    groups: tuple[int, int] | None = setting(
        None, "Two numbers of samples: classes with fewer than the first are few-shot, those with more than the second "
        "many-shot. Null takes the literature's for the source, and 1 % and 5 % of the labelled pixels for label maps.")

    @model_validator(mode="before")
    @classmethod
    def _as_usual(cls, tree: Any) -> Any:
        """A benchmark is thinned and dealt as the literature does where nothing else is asked for."""
        source = tree.get("source", "digits") if isinstance(tree, dict) else None
        if not isinstance(source, str) or source not in BENCHMARKS:
            return tree
        usual = USUAL | ({"imbalance": 1.0} if source == "imagenet_lt" else {})
        return tree | {key: value for key, value in usual.items() if tree.get(key) is None}
