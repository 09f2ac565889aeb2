"""The errors that raylt raises on purpose, with their codes.

    RayltError ─ ConfigError   ─ UnknownMethod      input: exit code 2
               ├ DataError                          input: exit code 2
               ├ ClientError   ─ ClientLost         the call of one client failed
               ├ LateWrite                          a tensor of a message, reply or state was changed
               ├ TooFewReplies                      a round fell below its quorum
               ├ BudgetSpent                        an upload would exceed the privacy budget
               ├ Overflow                           a value does not fit into a secure sum
               ├ ServerLost                         the process that aggregates died
               ├ CheckpointError                    a run folder that cannot be used
               │   └ FolderHeld                     another process uses the folder
               └ DiskFull                           the disk has no space left

Each message is one line: `setting: what is wrong (value). What to do.` Each error has a stable `code`, listed in
`CODES`, and `details`: the values that the message mentions.
"""

import difflib
import os
import shlex
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

INSTALLED = frozenset({"site-packages", "dist-packages"})  # Names of folders with packages, in any Python.

# code: one sentence for the documentation
CODES: dict[str, str] = {
    # checkpoint
    "checkpoint.damaged": "A checkpoint cannot be read, or its content does not match its hash.",
    "checkpoint.not-found": "A run folder has no checkpoint that can be read.",
    "checkpoint.not-kept": "The checkpoint after this step is not kept.",
    # client
    "client.failed": "A client's function raised an exception.",
    "client.late": "A client did not answer before the deadline.",
    "client.lost": "The process that held a client died before it replied.",
    "client.not-asked": "The client was not called in this round.",
    "client.not-named": "Each client has a model of its own, and the client is not named.",
    "client.not-started": "A client actor died while it started.",
    "client.unknown": "The client is unknown, or it has no model.",
    # cluster
    "cluster.already-joined": "The process is in another Ray cluster already.",
    "cluster.bad-address": "The address of a Ray cluster is not HOST:PORT or auto.",
    "cluster.busy": "The cluster had no free resources for the actors in time.",
    "cluster.no-answer": "No server answers at the address of a cluster.",
    "cluster.not-found": "No Ray cluster runs on this machine.",
    "cluster.not-joined": "A Ray cluster could not be joined.",
    "cluster.not-ray": "The server at the address of a cluster is not Ray.",
    "cluster.not-started": "A new local Ray cluster did not start.",
    "cluster.tls-file": "A file for TLS is not named or cannot be read.",
    "cluster.token-missing": "A cluster requires a token, and this machine has none.",
    "cluster.token-refused": "A cluster refuses the token of this machine.",
    "cluster.token-unreadable": "The token file cannot be read, or holds no token.",
    "cluster.token-unwritable": "The token of a new cluster cannot be written.",
    "cluster.too-small": "The cluster has too few CPUs or GPUs, or too little memory, for the planned actors.",
    "cluster.unprotected": "A cluster does not require a token, although the user requires token authentication.",
    "cluster.untrusted-file": "The file with the address of the local cluster belongs to another user.",
    # command
    "command.failed": "A command raised an unexpected exception.",
    "command.usage": "A command or option does not exist, or an argument is missing or malformed.",
    # config
    "config.conflict": "Two settings or options exclude each other.",
    "config.malformed": "A value cannot be parsed.",
    "config.missing": "A required setting is missing.",
    "config.missing-package": "A setting needs a package that is not installed.",
    "config.out-of-range": "A number is outside its range.",
    "config.unknown-key": "No setting has this name.",
    "config.unknown-name": "The setting does not accept this name.",
    "config.wrong-type": "A value has the wrong type.",
    # data
    "data.bad-name": "The name of a class, client or folder cannot be printed.",
    "data.cache-busy": "A process is decoding images into the cache.",
    "data.cache-unreadable": "The cache of decoded images cannot be read on this node.",
    "data.decoding-failed": "A process that decodes images could not be started, failed or died.",
    "data.doubles": "Test images are also training images.",
    "data.malformed": "A data set's files do not have the expected layout or content.",
    "data.no-ids": "The data records no client ids.",
    "data.no-test-images": "The data has no test images on which to evaluate a model.",
    "data.not-found": "A data set's file or folder does not exist.",
    "data.not-readable": "A folder of a data set cannot be read.",
    "data.split-changed": "A split file was changed after it was saved.",
    "data.split-mismatch": "A split was drawn from other data, or for other clients.",
    "data.too-few": "The data has too few samples or classes for the settings.",
    "data.undecodable": "Images cannot be decoded.",
    "data.unknown-cache": "No cache of decoded images has this name.",
    "data.unknown-class": "Images are of a class that the model does not know.",
    "data.wrong-kind": "A setting does not apply to this kind of labels.",
    "data.wrong-layout": "The images do not lie in one of the known layouts of folders.",
    "data.wrong-shape": "Images have a shape or type that the model does not take.",
    # device
    "device.changed": "A run would continue on another kind of device than it was made on.",
    "device.full": "The device has no room for a client actor.",
    "device.not-found": "The settings ask for GPUs, and the nodes have none.",
    "device.not-leased": "A GPU is asked for, and Ray leased none to the process.",
    "device.not-recordable": "A step that is declared recordable cannot be recorded as a CUDA graph.",
    "device.unusable": "A GPU is asked for or was leased, and torch cannot use it.",
    # disk
    "disk.full": "A file could not be written: the disk or the user's quota is full, or the file would be too large.",
    # export
    "export.changed": "An exported file was changed after it was written.",
    "export.malformed": "The file is damaged, or raylt export did not write it.",
    "export.not-a-graph": "torch.export cannot follow the model.",
    "export.not-rebuildable": "The model cannot be rebuilt from its entries.",
    "export.other-format": "The file has a format that this raylt does not read.",
    "export.unknown-format": "The file name does not have an ending that raylt export writes.",
    # file
    "file.bad-name": "A name is not a valid file name.",
    "file.exists": "A file that a command would write exists already.",
    "file.malformed": "A file that the user named does not have the content that the command expects.",
    "file.not-found": "A file does not exist.",
    "file.not-plain": "A path is a link, a device or a file with a second hard link, where a plain file is expected.",
    "file.too-large": "A file is larger than its content can be.",
    "file.unreadable": "A file cannot be read.",
    "file.unwritable": "A file or folder cannot be written.",
    # job
    "job.file-elsewhere": "A file that a job needs is not below the folder that goes to the cluster.",
    "job.not-found": "The cluster has no job of raylt with this id or run.",
    "job.not-sent": "The working directory cannot be sent to a cluster.",
    # method
    "method.wrong-argument": "A method passes raylt a value that it cannot use.",
    # model
    "model.failed": "A forward or backward pass of the user's model raised an exception.",
    "model.images-too-small": "The images are too small for the model.",
    "model.lacks-layer": "The model has no layer of this name.",
    "model.none-global": "Each client keeps its own running statistics, so the run has no global model.",
    "model.not-finite": "A model's weights or its predictions are infinite or not a number.",
    "model.not-repeatable": "The user's model has different weights or logits when it is built or called again.",
    "model.out-of-range": "An entry of a new model holds a value that no reply may have.",
    "model.shared-memory": "Entries of the user's model share memory.",
    "model.teacher-mismatch": "A teacher does not fit the task or the model.",
    "model.teacher-unavailable": "The files of a teacher do not exist and cannot be fetched.",
    "model.too-narrow": "The model's features have too few dimensions.",
    "model.weights-mismatch": "A file of weights is damaged or belongs to another model.",
    "model.weights-unavailable": "Weights do not exist and cannot be fetched.",
    "model.wrong-classifier": "The classifier of the user's model is not the layer that the method needs.",
    "model.wrong-dtype": "A weight of the user's model is not float32, or an entry has a type that cannot be sent.",
    "model.wrong-input": "The model does not take images of this size or number of channels.",
    "model.wrong-output": "The features or logits of the user's model have an unexpected shape, or are not finite.",
    "model.wrong-type": "The model is not a SplitModel, or its classifier cannot be separated.",
    "model.wrong-width": "The model's features and the teacher's differ in their number of dimensions.",
    # plugin
    "plugin.changed": "A run was made with another version of a plugin.",
    "plugin.failed": "A plugin's file or one of its functions raised an exception, or a function's result is unusable.",
    "plugin.missing": "A run was made with a plugin that is not registered.",
    "plugin.name-taken": "A user's file or plugin has a name that belongs to another.",
    "plugin.no-method": "A file defines no method.",
    "plugin.not-importable": "The user's code does not import in another process.",
    "plugin.not-picklable": "A value cannot be sent to another process.",
    "plugin.not-python": "A plugin is not a Python file.",
    "plugin.unreadable": "A plugin's file cannot be read.",
    "plugin.wrong-type": "A registered value is neither a method nor a function of a known kind.",
    # privacy
    "privacy.budget-spent": "An upload with noise would exceed the privacy budget.",
    "privacy.not-covered": "A method uploads something that the noise does not cover, or nothing that it covers.",
    "privacy.not-summable": "A method asks for a part of the replies that a secure sum cannot give.",
    "privacy.nothing-to-attack": "The run uploads nothing that can be attacked in this way.",
    "privacy.rehearsal": "A finish would be rehearsed with noise, which would spend the budget of the finish itself.",
    "privacy.too-noisy": "The noise of the privacy budget leaves no class with a sample.",
    # record
    "record.changed": "A file of a study was changed after raylt wrote it, or contradicts itself.",
    "record.other-schema": "The results of a study have a schema that this raylt does not read.",
    # reply
    "reply.additional": "A reply has a part or an entry that was not asked for.",
    "reply.condition": "A part of a reply does not meet the condition that the server declared.",
    "reply.late-write": "A tensor was changed in place that is part of a message, a reply or a client's state.",
    "reply.missing": "A reply has no value for a part or an entry.",
    "reply.no-majority": "Two layouts of the replies are equally frequent, so none is the majority.",
    "reply.not-finite": "A reply holds a value that is infinite or not a number.",
    "reply.not-sendable": "A reply or a client's state holds something that must not be sent between processes.",
    "reply.out-of-range": "A reply holds a floating-point value beyond the bound of its part.",
    "reply.outlier": "A part of a reply has a norm many times that of most replies and of the message.",
    "reply.overflow": "A reply holds a value that is too large for the fixed point of a secure sum.",
    "reply.rejected": "A client's reply cannot be used.",
    "reply.too-few": "Fewer clients sent a usable reply than a call needs.",
    "reply.too-large": "A reply or a client's state takes more memory than allowed.",
    "reply.wrong-integer": "A reply holds a whole number outside the range of its part.",
    "reply.wrong-shape": "An entry of a reply has the wrong type or shape.",
    "reply.wrong-share": "A member of a secure sum dealt shares of a different secret than the one it committed to.",
    "reply.wrong-sums": "A part of a reply does not count exactly its client's samples, or is not a sum over them.",
    "reply.wrong-weight": "A reply has another weight than the server expects.",
    # run
    "run.busy": "Another process uses the run folder.",
    "run.changed": "A file of a run was changed, or belongs to another run or version.",
    "run.exists": "The folder for a new run exists already.",
    "run.not-branchable": "A run cannot be branched: the new run would differ from the first round on, or not at all.",
    "run.not-extensible": "The run cannot get more rounds, because its rounds depend on their number.",
    "run.not-finished": "The run is not finished, or has not reached the step.",
    "run.not-found": "A folder is not a run folder.",
    "run.not-judged": "The run did no evaluation after this step.",
    "run.not-running": "No process is running the run or job.",
    "run.other-split": "The runs have different splits.",
    "run.other-version": "Another version of raylt made the run.",
    "run.tracker-failed": "MLflow or W&B failed while it logged a run.",
    "run.wrong-kind": "The command does not apply to a run of this method or task.",
    # search
    "search.bad-range": "A range of a search is malformed.",
    "search.budget-too-small": "One trial takes more than the budget.",
    "search.busy": "Another process is running the search.",
    "search.changed": "Files of a search were changed, or do not fit this version.",
    "search.different": "A folder holds a search with other settings.",
    "search.exists": "A search with this name exists already.",
    "search.fixed-setting": "A trial continues from another, and a setting differs that acts before the first round.",
    "search.no-class": "No class that the metric covers has validation samples.",
    "search.no-result": "No trial of a search reached its end.",
    "search.no-rungs": "There are too few rounds to compare trials before their end.",
    "search.not-found": "A folder does not hold a search.",
    "search.not-searchable": "A setting decides no result, so a search cannot vary it.",
    "search.not-verifiable": "A search with a scheduler of Ray Tune has no hashes that could be checked.",
    "search.nothing-to-search": "No field or setting has a range.",
    "search.unknown-field": "No searched method has this field.",
    # serve
    "serve.already-running": "The cluster already runs Ray Serve.",
    "serve.failed": "A request to a service raised an unexpected exception.",
    "serve.foreign-host": "A request to a service without a token calls the machine by a foreign name.",
    "serve.no-address": "A service cannot listen at its host and port.",
    "serve.no-such-path": "A service has nothing at the path of a request.",
    "serve.token-refused": "A request to a service has no token or a wrong one.",
    "serve.too-large": "An image is larger than a service takes.",
    "serve.too-many": "An address sends a service more images per second than allowed.",
    "serve.too-slow": "The image of a request to a service does not arrive in time.",
    "serve.unprotected": "A service without a token would be reachable from other machines.",
    "serve.wrong-type": "A request holds a form, not an image file.",
    "serve.wrong-verb": "A request uses an HTTP method that its path does not accept.",
    # server
    "server.failed": "The experiment raised an unexpected exception.",
    "server.lost": "The process that hosts the experiment died.",
    "server.map-failed": "A function that the server runs on items (fleet.map) raised an exception.",
    "server.not-finite": "The global model, a message or a figure of the server is infinite or not a number.",
    # signature
    "signature.not-made": "A signature cannot be made with the given key.",
    "signature.wrong": "A signature does not match the file, or its signer is not allowed.",
    # study
    "study.bad-claim": "A claim of a study cannot be read.",
    "study.bad-name": "The name of an arm or a cell cannot be the name of a folder.",
    "study.changed": "A run or search in the study's folder was made with other settings than the study plans.",
    "study.damaged-run": "A run of a study has files that contradict each other, were changed or cannot be read.",
    "study.duplicate-name": "Two arms or cells of a study would share a folder or a name.",
    "study.duplicate-run": "Two of the given runs have the same arm, cell and seed.",
    "study.empty-group": "A claim is about a group of classes without test images.",
    "study.no-figure": "No finished run has the figure that was asked for.",
    "study.not-a-study": "The path is not a study's folder, its results or a run folder.",
    "study.not-comparable": "Runs of one cell differ in split, budget, optimiser, evaluation or code.",
    "study.not-connected": "Arms that have no seeds in common, not even through other arms, cannot be ranked together.",
    "study.not-runnable": "None of the printed cells can be run.",
    "study.nothing-finished": "No run of the study is finished.",
    "study.other-code": "A run was made by another version of the code.",
    "study.runs-failed": "Some runs of a study failed.",
    "study.tuning-failed": "The search of an arm failed.",
    # system
    "system.unsupported": "raylt does not run on this operating system.",
    # training
    "training.diverged": "The updates of most clients are infinite, NaN, or too large for a model.",
}


_AT_THE_SHELL = "RAYLT_AT_THE_SHELL"  # Environment variable.
MAX_MESSAGE_LENGTH = 2000  # In characters. A path alone may have 4,096.
MAX_CAUSE_LENGTH = 200


class RayltError(Exception):
    """Base class of all errors that raylt raises on purpose.

    Args:
        message: One line that says what is wrong with which value, and what to do.
        code: Stable name of the kind of error, a key of `CODES`.
        details: The values that the message mentions, such as `key`, `value`, `path`, `client` or `round`.

    Attributes:
        exit_code: Exit code of the command line.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "", **details: object):
        super().__init__(message)
        self.code = code
        self.details = details

    def __str__(self) -> str:
        """Return the message on one line, with unprintable characters replaced, and shortened if it is long."""
        text = on_one_line(super().__str__())
        return (
            text
            if len(text) <= MAX_MESSAGE_LENGTH
            else f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 2 :]}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def on_one_line(text: str) -> str:
    """Replace each unprintable character of a text, such as a newline or an escape, with a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def quoted(path: object) -> str:
    """Return a path quoted for the shell, for commands in messages that the user may copy and paste.

    A path that begins with a dash gets ./ in front, so that no command takes it for an option.
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def count_of(number: float, unit: str, plural: str | None = None) -> str:
    """Format a number with its unit, as in `1 CPU`, `0.5 CPUs` or `3 CPUs`.

    Args:
        number: The number.
        unit: Singular of the unit.
        plural: Plural of the unit; by default the singular with an s.
    """
    return f"{number:.15g} {unit if number == 1 else plural or unit + 's'}"


def did_you_mean(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return `Did you mean X? ` with the choice most similar to a mistyped word, or "" if none is similar.

    The comparison ignores case. Numbers are similar to nothing, since they are not mistyped names.

    Args:
        word: The mistyped word.
        choices: The valid words.
        prefix: Text before the choice, such as the section of a setting.
    """
    written = {choice.casefold(): choice for choice in choices}
    alike = 0.5 if len(word) <= 2 else 0.6  # one wrong letter of two is half of the word
    nearest = [] if word.isdecimal() else difflib.get_close_matches(word.casefold(), written, 1, alike)
    return f"Did you mean {prefix}{written[nearest[0]]}? " if nearest else ""


@contextmanager
def at_the_shell() -> Iterator[None]:
    """Let error messages inside the block mention shell commands and options, not Python calls.

    Child processes inherit this.
    """
    before = os.environ.get(_AT_THE_SHELL)
    os.environ[_AT_THE_SHELL] = "1"
    try:
        yield
    finally:
        os.environ.pop(_AT_THE_SHELL)
        if before is not None:
            os.environ[_AT_THE_SHELL] = before


def spoken(shell: str, python: str) -> str:
    """Return the shell form of a command or option if raylt runs at the shell, otherwise the Python form."""
    return shell if _AT_THE_SHELL in os.environ else python


def _restore(kind: type[RayltError], args: tuple[object, ...], fields: dict[str, object]) -> RayltError:
    """Rebuild a pickled error without calling the constructor of its class."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(RayltError):
    """Raised if a setting is unknown, of the wrong type, out of range or in conflict with another setting."""

    exit_code = 2


class UnknownMethod(ConfigError):
    """Raised if no method has the given name."""


class DataError(RayltError):
    """Raised if data is missing, malformed or cannot be split as asked."""

    exit_code = 2


class ClientError(RayltError):
    """Raised if a client's function raised an exception or its reply cannot be used.

    Args:
        client: Id of the client, or -1 if unknown.
        round: Number of the round, from 1.
        function: Name of the client function.
        cause: One line that describes the cause.
    """

    def __init__(
        self, client: int, round: int, function: str, cause: str, *, code: str = "client.failed", **details: object
    ):
        message = f"client {client}, round {round}, {function}: {cause}"
        super().__init__(message, code=code, client=client, round=round, function=function, **details)
        self.client = client
        self.round = round
        self.function = function
        self.cause = cause


class ClientLost(ClientError):
    """Raised if the process that held a client died before the client replied."""

    def __init__(self, client: int, round: int, function: str, cause: str):
        super().__init__(client, round, function, cause, code="client.lost")


class LateWrite(RayltError):
    """Raised if a client changed a tensor of its message, or one that it had put into its reply or state.

    Args:
        client: Id of the client.
        path: Path of the tensor, which starts with message, reply or state.
    """

    def __init__(self, client: int, path: str):
        if path.startswith("message."):
            problem = "was changed in place; change a copy (tree.snapshot)"
        else:
            problem = "was changed after it was handed over; hand over a copy (tree.snapshot), or change it earlier"
        super().__init__(f"client {client}: {path} {problem}", code="reply.late-write", client=client, path=path)
        self.path = path


class BudgetSpent(RayltError):
    """Raised if an upload with noise would exceed the run's privacy budget."""


class Overflow(RayltError):
    """Raised if a value is too large for the fixed-point numbers of a secure sum."""


class TooFewReplies(RayltError):
    """Raised if fewer clients sent a usable reply than `federation.quorum` requires."""


class Diverged(TooFewReplies):
    """Raised if the updates of most clients are infinite, NaN or far too large."""


class ServerLost(RayltError):
    """Raised if the process that hosts the experiment died. The run continues from its last checkpoint.

    Args:
        cause: One line that describes the cause.
    """

    def __init__(self, cause: str):
        super().__init__(
            f"{cause}; continue with {spoken('raylt resume', 'raylt.resume')}", code="server.lost", cause=cause
        )
        self.cause = cause


class CheckpointError(RayltError):
    """Raised if a run folder already exists, is incomplete or damaged, or belongs to another configuration."""

    exit_code = 2


class FolderHeld(CheckpointError):
    """Raised if another process uses the run folder."""


class DiskFull(RayltError):
    """Raised if a file cannot be written: the disk or the user's quota is full, or the file would be too large.

    Args:
        path: Path of the file.
        too_large: Whether the file would exceed the limit that the shell sets (ulimit -f).
    """

    def __init__(self, path: Path, too_large: bool = False):
        then = spoken("give the same command again", "make the same call again")
        super().__init__(f"{path}: {_full(too_large)}, then {then}.", code="disk.full", path=str(path))
        self.path = path
        self.too_large = too_large

    def continued(self, folder: Path, command: str) -> "DiskFull":
        """Return this error with the run or search that it ended, and the command that continues it.

        Args:
            folder: Folder of the run or search.
            command: The command.
        """
        error = DiskFull(folder, self.too_large)
        place = "" if self.path.is_relative_to(folder) else f"{self.path}: "
        error.args = (f"{folder}: {place}{_full(self.too_large)}, then continue with {command}.",)
        return error


def _full(too_large: bool) -> str:
    if too_large:
        return "a file would exceed the limit of this shell (ulimit -f). Raise the limit"
    return "the disk is full. Free some space"


def user_fault(error: BaseException) -> str:
    """Describe an exception by its type, its message and the innermost line of the user's own code.

    Code of raylt, of Python and of installed packages is not the user's. If the traceback has no line of the user's
    code, the description names the innermost line outside installed packages.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = _user_frames(error)
    if not frames:
        return one_line(error)
    inner = frames[-1]
    return f"{type(error).__name__}: {_message(error)} ({Path(inner.filename).name}:{inner.lineno}, in {inner.name})"


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn sys.exit() in the user's own code into an error, because it would end the process silently.

    Other exceptions that do not derive from `Exception`, such as GeneratorExit, become errors too. Ctrl-C does not.

    Raises:
        ConfigError: The code inside the block tried to end the process. The message names the line.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt) or not in_user_code(error):
            raise
        raise ConfigError(
            f"{user_fault(error)}: would end the process. Raise an error instead.",
            code="plugin.failed",
            cause=user_fault(error),
        ) from error


@contextmanager
def own_function(key: str, name: str) -> Iterator[None]:
    """Convert exceptions of a user's function inside the block to errors that name the setting and the line.

    Args:
        key: Setting that names the function.
        name: Name of the function.

    Raises:
        ConfigError: The function raised an exception, or does not accept the arguments of the call.
    """
    try:
        yield
    except RayltError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} raised an exception ({user_fault(error)}). Correct the function.",
            code="plugin.failed",
            key=key,
            value=name,
            cause=user_fault(error),
        ) from error


@contextmanager
def abrupt_exits_raised() -> Iterator[None]:
    """Let os._exit() in the user's own code raise SystemExit, which `no_exit` turns into an error.

    Child processes are not affected.
    """
    leave = os._exit
    process = os.getpid()

    def raise_or_leave(status: int) -> NoReturn:
        if os.getpid() == process and _is_user_code(sys._getframe(1).f_code.co_filename):
            raise SystemExit(status)
        leave(status)

    os._exit = raise_or_leave
    try:
        yield
    finally:
        os._exit = leave


def in_user_code(error: BaseException) -> bool:
    """Return whether an exception passed through the user's own code."""
    return bool(_user_frames(error))


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]


@cache  # An infinite recursion has a thousand frames of one file.
def _is_user_code(file: str) -> bool:
    """Return whether a file is the user's own code: not raylt, not Python, not an installed package."""
    home, path = Path(__file__).resolve().parents[1], Path(file)
    others = [home / name for name in ("raylt", "actors", "tune")] + [
        Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")
    ]
    file_path = path.resolve()
    if not path.is_absolute() or not INSTALLED.isdisjoint(file_path.parts):
        return False
    return not any(file_path.is_relative_to(folder) for folder in others)


def one_line(error: BaseException) -> str:
    """Describe an exception in one line: type, message and the innermost line outside installed packages."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_message(error)}{place}"


def _message(error: BaseException) -> str:
    """Return the message of an exception, shortened to one line."""
    try:
        text = str(error)
    except Exception:
        return "its message cannot be read"
    return textwrap.shorten(" ".join(text.split()), 400, placeholder=" ...")


def shorten(text: str, length: int = 80, mark: str = "...") -> str:
    """Return a text of at most `length` characters, in which `mark` replaces the end of a longer text."""
    return text if len(text) <= length else text[: length - len(mark)] + mark


def first_names(names: Sequence[str], most: int = 10) -> str:
    """Return the first names of a list as text, with `, ..` in place of the names after the first `most`."""
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")


def as_cause(error: Exception) -> str:
    """Return an error in one line of at most 200 characters without a full stop, for another error's brackets.

    Of raylt's own errors, and of texts that are too long, only the first sentence is kept; the others are remedies.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RayltError) or len(text) > MAX_CAUSE_LENGTH:
        text = text.partition(". ")[0]
    return shorten(text.rstrip("."), MAX_CAUSE_LENGTH)


def type_name(value: object) -> str:
    """Return the class of a value as `a list` or `an int`, without calling any of the value's methods."""
    name = "".join(letter for letter in type(value).__name__[:60] if letter.isprintable())
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def without_remedy(error: BaseException) -> str:
    """Return the message of an error without its last sentence, for an error that has another remedy."""
    problem, _, _ = str(error).rpartition(". ")
    return problem if problem and isinstance(error, RayltError) else str(error).rstrip(".")


def describe_error(error: BaseException) -> str:
    """Describe any error in one line: raylt's own errors by their message, others by `user_fault`."""
    return str(error) if isinstance(error, RayltError) else user_fault(error)
