"""How the worker process begins: run as a file, so that nothing has started a thread before.

python start.py <descriptor of the socket> <pid of the parent> <hide|show>
"""

from __future__ import annotations

import ctypes
import sys

HIDE = "hide"
_CLONE_NEWUTS, _CLONE_NEWUSER = 0x04000000, 0x10000000


def hide_host_name() -> bool:
    """Give this process alone another host name; False where the system does not allow it.

    An ordinary user may do so only in a user namespace, which a process can enter only while it has one thread.
    """
    name = b"restricted"
    try:
        library = ctypes.CDLL(None)
        alone = library.unshare(_CLONE_NEWUTS) == 0 or library.unshare(_CLONE_NEWUSER | _CLONE_NEWUTS) == 0
        return bool(alone and library.sethostname(name, len(name)) == 0)
    except AttributeError:  # not Linux
        return False


if __name__ == "__main__":
    hidden = sys.argv[3] == HIDE and hide_host_name()
    from statsbridge_aim.worker import serve

    serve(int(sys.argv[1]), int(sys.argv[2]), hidden)
