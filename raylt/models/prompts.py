"""Text towers for learned prompts: texts of "[V]_1 ... [V]_M {class}" from context vectors V in place of words.

Source: CoOp (Zhou et al., IJCV 2022), Eq. 2.

The attribute `prompts` of an image-text model makes such a tower for given classes; for other models it is None.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.errors import ConfigError
from raylt.models.trainable import Frozen

#: The words before the class name in a prompt that is not learned.
WORDS = "a photo of a"


class Prompts(Frozen):
    """The text tower of an image-text model for prompts of M context vectors and a class name. It is never trained.

    Args:
        body: Module that computes the texts from the context.
        words: Vectors of the tokens of "a photo of a", [n, w]; w is the width of a token's vector.
    """

    def __init__(self, body: nn.Module, words: Tensor):
        super().__init__(body)
        self.words = words

    @abstractmethod
    def forward(self, context: Tensor) -> Tensor:
        """Return the texts of all classes, float32 [C, d], with the length of a feature.

        The inner product of a feature and a text is the logit.

        Args:
            context: Context vectors [M, w] for all classes, or [C, M, w] with separate ones for each class.
        """


class OpenClipPrompts(Prompts):
    """The text tower of an open_clip model.

    The tower reads no tokens after the end of a text, so these are left out.

    Args:
        network: The part of the model that has the text tower's layers, on the CPU; it is not changed.
        tokens: Tokens of the class names, int64 [C, L], each from the start token to the end token with padding.
        words: Tokens of "a photo of a", int64 [L], with a start and an end token.
        context: Number of context vectors, M.
        length: Length of a text.
    """

    def __init__(self, network: Any, tokens: Tensor, words: Tensor, context: int, length: float):
        ends = _ends(network, tokens)
        positions = int(ends.max()) + 1 + context
        body = _Tower(network, network.token_embedding(tokens)[:, : positions - context].detach(), ends + context)
        super().__init__(body, network.token_embedding(words)[1 : int(_ends(network, words[None]))].detach())
        self.length = length

    def forward(self, context: Tensor) -> Tensor:
        return F.normalize(self.body(context).float(), dim=1) * self.length


class _Tower(nn.Module):
    """Layers of open_clip's text tower after the embedding of tokens.

    Args:
        network: The part of the model that has the text tower's layers.
        embedded: Token vectors of the class names, [C, n, w].
        ends: Position of the end token in a prompt, int64 [C].
    """

    def __init__(self, network: Any, embedded: Tensor, ends: Tensor):
        super().__init__()
        positions = int(ends.max()) + 1
        self.transformer = copy.deepcopy(network.transformer)
        self.ln_final = copy.deepcopy(network.ln_final)
        self.projection = copy.deepcopy(network.text_projection)
        self.embedded = nn.Buffer(embedded)
        self.ends = nn.Buffer(ends)
        self.positions = nn.Buffer(network.positional_embedding[:positions].detach().clone())
        self.mask = nn.Buffer(network.attn_mask[:positions, :positions].clone())

    def forward(self, context: Tensor) -> Tensor:
        own = context.expand(len(self.embedded), -1, -1)
        x = torch.cat([self.embedded[:, :1], own, self.embedded[:, 1:]], 1) + self.positions
        x = self.ln_final(self.transformer(x, attn_mask=self.mask))
        x = x[torch.arange(len(x), device=x.device), self.ends]
        return self.projection(x) if isinstance(self.projection, nn.Module) else x @ self.projection


def _ends(network: Any, tokens: Tensor) -> Tensor:
    """Return the position of the end token in each text, int64 [C], at which open_clip reads off the embedding."""
    if _pooling(network) == "argmax":
        return tokens.argmax(1)
    end = getattr(network, "text_eos_id", None)
    return (tokens == (network.eos_id if end is None else end)).int().argmax(1)


def _pooling(network: Any) -> str:
    return getattr(network, "text_pool_type", None) or network.pool_type


def open_clip_prompts(
    model: Any, tokenize: Callable[[list[str]], Tensor], labels: list[str], context: int, name: str
) -> OpenClipPrompts:
    """Return the text tower of an open_clip model for prompts.

    Args:
        model: The whole model, on the CPU.
        tokenize: The model's tokenizer.
        labels: Labels of the classes.
        context: Number of context vectors, M.
        name: Name of the model, for error messages.

    Raises:
        ConfigError: The tower does not read texts from left to right, or M vectors and the labels exceed its length.
    """
    network = getattr(model, "text", model)
    ordinary = getattr(network, "attn_mask", None) is not None and getattr(network, "cls_emb", None) is None
    if not ordinary or _pooling(network) not in ("argmax", "eos"):
        raise ConfigError(
            f"model: learned prompts need a text tower that reads from left to right up to an end token, and this one "
            f"does not ({name}). Use another model, such as clip:ViT-B-32/openai.",
            code="config.conflict",
            key="model",
            value=name,
        )
    tokens = tokenize(labels)
    most = tokens.shape[1] - int(_ends(network, tokens).max()) - 1
    if context > most:
        raise ConfigError(
            f"method.length: the text tower takes {tokens.shape[1]} tokens, too few for this number of vectors and the "
            f"longest class name ({context}). Set method.length to at most {most}.",
            code="config.out-of-range",
            key="method.length",
            value=context,
            most=most,
        )
    length = model.logit_scale.detach().exp().sqrt().item()
    return OpenClipPrompts(network, tokens, tokenize([WORDS])[0], context, length)
