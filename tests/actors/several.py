"""A program that opens several Ray sessions in one process, for test_joining.py; it prints how it entered each."""

import os
import sys
from pathlib import Path

os.chdir(Path(sys.argv[1]))
from actors.cluster.session import session  # noqa: E402  (Ray reads where it is started)


def remote_answer() -> int:
    import ray

    return ray.get(ray.remote(lambda: 42).remote(), timeout=60)


for mode in (None, "disabled", None):
    os.environ.pop("RAY_AUTH_MODE", None)
    if mode is not None:
        os.environ["RAY_AUTH_MODE"] = mode
    with session(None) as cluster:
        assert cluster.started
        print(f"new:{cluster.token}", flush=True)
        with session(None) as within:  # a session inside a session uses the outer one and leaves it open
            print(f"here:{within.token}", flush=True)
        assert remote_answer() == 42
print(f"RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE')}")
