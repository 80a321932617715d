"""Locks of files, which end with the process that holds them; Windows has none."""

try:
    import fcntl
except ImportError:
    fcntl = None


def lock_or_refuse(descriptor: int) -> bool:
    """Lock a file until it is closed; False on a system or file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_when_free(descriptor: int) -> None:
    """Wait until no other process holds a file, and lock it until it is closed.

    On a system without locks nothing waits: there, of processes that fetch the same file at the
    same time, the digest tells what they spoilt.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
