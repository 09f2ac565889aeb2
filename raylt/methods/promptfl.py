"""PromptFL: clients learn the words before the class names of an image-text model (Guo et al., IEEE TMC 2023).

Both towers are frozen. Prompts and equation numbers are CoOp's (Zhou et al., IJCV 2022). Checked against the authors'
repository, PEILab-Federated-Learning/PromptFL at da401e7. Departures:
[1] A prompt has no full stop at its end: Eq. 2 has none, the code has one.
[2] In the code, words replace all vectors, even vectors that would differ by class. Here "a photo of a" are the last
    vectors, next to the class name, and the other vectors start at random. With `length=4` the model before training
    is the zero-shot model of `classifier=text`.
[3] The class name comes after the vectors. The code can also put it before them or between them.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.method import Method
from raylt.core.server import Server
from raylt.data.task import TaskSpec
from raylt.errors import ConfigError
from raylt.hyper import Choice, hp
from raylt.models.prompts import Prompts
from raylt.models.split import SplitModel, with_classifier

SPREAD = 0.02  # Standard deviation of random vectors, from CoOp's code.


class PromptFL(Method):
    """FedAvg of the context vectors of prompts "[V]_1 ... [V]_M class", Eq. 2. Nothing else is trained or sent.

    It needs `model=clip:NAME` and `trainable=classifier`.
    """

    name: ClassVar[str] = "promptfl"
    paper: ClassVar[str] = "Guo et al., IEEE TMC 2023; prompts of Zhou et al., IJCV 2022"
    link: ClassVar[str | None] = "https://github.com/PEILab-Federated-Learning/PromptFL"
    learns_prompts: ClassVar[bool] = True

    length: int = hp(16, Choice(4, 8, 16), "M, context vectors of a prompt, Eq. 2", ge=1)
    context: Literal["unified", "specific"] = hp(
        "unified", Choice("unified", "specific"), "the same vectors for all classes, or separate ones for each class"
    )
    initial: Literal["random", "words"] = hp(
        "random", Choice("random", "words"), 'first vectors; words: the last ones are "a photo of a" [2]'
    )

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        assert base.prompts is not None, "Setup rejects models without a text tower"
        prompts = base.prompts(spec.class_names, self.length)  # [1] [3]
        assert isinstance(prompts, Prompts)
        base.classifier = PromptClassifier(prompts, self.first_context(prompts.words, spec.classes))
        return base

    def first_context(self, words: Tensor, classes: int) -> Tensor:
        """Return the vectors before training, [M, w], or [C, M, w] with `context=specific` [2].

        Args:
            words: Vectors of the tokens of "a photo of a", [n, w].
            classes: Number of classes, C.

        Raises:
            ConfigError: The words need more vectors than a prompt has.
        """
        shape = (self.length, words.shape[1])
        context = SPREAD * torch.randn((classes, *shape) if self.context == "specific" else shape)
        if self.initial == "random":
            return context
        if self.length < len(words):
            raise ConfigError(
                f"method.length: method.initial=words needs {len(words)} vectors, but there are fewer "
                f"({self.length}). Set method.length to at least {len(words)}, or method.initial=random.",
                code="config.conflict",
                key="method.length",
                value=self.length,
            )
        context[..., -len(words) :, :] = words
        return context

    def global_model(self, server: Server) -> SplitModel:
        """Return the model with the texts of the learned prompts as a linear classifier."""
        classifier = server.model.classifier
        assert isinstance(classifier, PromptClassifier)
        with torch.no_grad():
            return with_classifier(server.model, classifier.texts(), None)


class PromptClassifier(nn.Module):
    """Classifier with the inner products of features and the texts of prompts as logits, Eq. 3.

    Args:
        prompts: The text tower.
        context: Vectors before training, [M, w] or [C, M, w].
    """

    def __init__(self, prompts: Prompts, context: Tensor):
        super().__init__()
        self.prompts = prompts
        self.context = nn.Parameter(context)

    def texts(self) -> Tensor:
        """Return the text of each class, [C, d]."""
        return self.prompts(self.context)

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.texts())
