"""What every data set here shares: a TFDS builder stored as array_record, and a cache it is prepared into once.

TensorFlow is not needed: TFDS writes and reads array_record files without it. A prepared data set lives in

    <cache>/[<content>/]<name>/<version>/,    <cache> = data_dir, else $JAXML25_CACHE, else ~/.cache/jaxml25.

It is written under a temporary name and renamed when complete, so two processes may prepare the same one at once, and what
a killed process left behind is never taken for data. `$JAXML25_DATA` holds a person's own copies of public data sets and is
only ever read.
"""

import contextlib
import fcntl
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

import tensorflow_datasets as tfds
from etils import epath

PathLike = str | os.PathLike[str]

_MARKER = "prepared.json"  # file name -> size; written last, so that its absence means "half-written"


class ArrayRecordBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS builder whose files are array_record, the format that is read at random without TensorFlow."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # Where TFDS looks for checksums. Its own search for this needs importlib_resources, which it does not depend on.
        cls.code_path = epath.Path(getattr(sys.modules[cls.__module__], "__file__", None) or ".")

    def __init__(self, *, file_format: str | None = "array_record", **kwargs):
        super().__init__(file_format=file_format, **kwargs)


def cache_dir(data_dir: PathLike | None = None) -> pathlib.Path:
    """The folder that prepared data sets live in: `data_dir`, else `$JAXML25_CACHE`, else `~/.cache/jaxml25`."""
    chosen = data_dir or os.environ.get("JAXML25_CACHE") or "~/.cache/jaxml25"
    return pathlib.Path(chosen).expanduser().absolute()


def prepared(builder: type[ArrayRecordBuilder], data_dir: PathLike | None = None, content: str = "") -> ArrayRecordBuilder:
    """Returns `builder` with its files on disk, writing them first if they are missing or damaged.

    Args:
      builder: the builder's class.
      data_dir: see `cache_dir`.
      content: names what the records were made from, for a data set whose source differs between machines: each content has
        its own folder.

    Raises:
      OSError: if the data set has to be written and the folder cannot be.
      ValueError: if it would have to be written under `$JAXML25_DATA`.
    """
    root = cache_dir(data_dir)
    final = root / content / builder.name / str(builder.VERSION)
    if not _is_complete(final):
        _refuse_read_only_data(root)
        try:
            _prepare(builder, root, final)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"cannot write the data cache {root} ({reason}); set JAXML25_CACHE to a writable folder"
            ) from error
    return builder(data_dir=root / content)


def _is_complete(folder: pathlib.Path) -> bool:
    try:
        sizes = json.loads((folder / _MARKER).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _refuse_read_only_data(root: pathlib.Path) -> None:
    local_copies = os.environ.get("JAXML25_DATA")
    if local_copies and root.resolve().is_relative_to(pathlib.Path(local_copies).resolve()):
        raise ValueError(f"data_dir must not lie in JAXML25_DATA, which is only read, got {root}")


def _prepare(builder: type[ArrayRecordBuilder], root: pathlib.Path, final: pathlib.Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(final.parent / ".lock"):
        if _is_complete(final):  # another process was faster
            return
        # On the same file system as `final`, or the rename would be a copy. A name of our own: TFDS draws its temporary
        # names from Python's global random state, which two processes with the same seed share.
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=".preparing-", dir=final.parent))
        try:
            silence = io.StringIO()  # TFDS shows progress bars, also for what takes a tenth of a second
            with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
                made = builder(data_dir=temporary)
                made.download_and_prepare()
            folder = pathlib.Path(made.data_dir)
            sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            (folder / _MARKER).write_text(json.dumps(sizes, indent=1))
            if final.exists():
                final.rename(temporary / "damaged")
            _publish(folder, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(made: pathlib.Path, final: pathlib.Path) -> None:
    try:
        made.rename(final)
    except OSError:
        if not _is_complete(final):  # where locks do not work, the other process's equal copy will do
            raise


@contextlib.contextmanager
def _exclusive(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks; `_publish` copes
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
