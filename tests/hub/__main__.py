"""The stand-in as a program: ``python -m hub --port 8900``.

``POST /__faults`` takes a JSON list of faults, ``GET /__log`` gives the requests so far, ``DELETE /__log`` forgets them.
"""

import argparse
import contextlib
import threading

from .server import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub", description="A stand-in for the Hugging Face Hub.")
    parser.add_argument("--port", type=int, default=8900, help="of the hub; the object store gets the next one")
    parser.add_argument("--root", help="folder of the data (a temporary one by default)")
    parser.add_argument("--page-size", type=int, default=1000, help="entries on a page of a tree listing")
    parser.add_argument("--lfs-threshold", type=int, default=5 * 2**20, help="a larger file is stored by LFS")
    parser.add_argument("--multipart-over", type=int, help="a larger object is uploaded in parts")
    parser.add_argument("--resolve-cache", action="store_true", help="redirect to small files, as hf.co does")
    parser.add_argument("--xet", action="store_true", help="Xet storage in ROOT/cas, by hf_xet's own local:// store")
    with serve(**vars(parser.parse_args())) as hub:
        print(f"hub {hub.url}  object store {hub.cdn}  root {hub.root}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
