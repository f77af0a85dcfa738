"""The service's weight: CPU seconds until it is ready, and memory after 100 searches and 20 uploaded photos.

    python benchmarks/serve.py demo/emoji.index

The service runs in a process of its own on loopback. Memory is what is resident (``VmRSS``) in the serving process, and
beside it in the processes that decode uploads. The run ends with status 1 above 300 MB, or where the service took more
than 1.5 s of CPU until it was ready.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from PIL import Image

MEGABYTES, SECONDS = 300, 1.5
WORDS = (
    "a laughing face",
    "something to drink",
    "a dog runs",
    "two red cars",
    "rainy weather",
    "fruit",
    "a boat",
)
BOUNDARY = "photo"


def upload(number: int, size: tuple[int, int]) -> bytes:
    """A form with one photo."""
    rng = np.random.default_rng(number)
    drawn = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize(size)
    file = io.BytesIO()
    drawn.save(file, "JPEG")
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{number}.jpg"\r\n'
    head += "Content-Type: image/jpeg\r\n\r\n"
    return head.encode() + file.getvalue() + f"\r\n--{BOUNDARY}--\r\n".encode()


def cpu(process: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> float:
    """Megabytes of a process in memory."""
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(kilobytes) * 1024 / 1e6


def below(process: int) -> list[int]:
    """The processes that a process started, and those that these started."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [one for child in children for one in (child, *below(child))]


def ask(connection: http.client.HTTPConnection, words: str = "", form: bytes = b"") -> None:
    """One search, in words or with a photo."""
    if form:
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        connection.request("POST", "/api/search", form, kind)
    else:
        connection.request("GET", f"/api/search?{urlencode({'text': words})}")
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200 or not json.loads(content)["hits"]:
        raise SystemExit(f"a search was answered by {answer.status}: {content[:300]!r}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", help="an index whose model has a runtime")
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--uploads", type=int, default=20)
    parser.add_argument("--size", type=int, nargs=2, default=(1600, 1200), metavar=("WIDTH", "HEIGHT"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "diptych", "serve", options.index, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            found = re.search(r"http://([\w.]+):(\d+)", service.stdout.readline())
            if found is None:
                raise SystemExit(f"the service did not start: {' '.join(command)}")
            connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
            ready = cpu(service.pid)
            print(f"ready after {ready:.2f} s of CPU\n\n| after | serving MB | decoding MB |\n|---|---|---|")
            held = resident(service.pid)
            print(f"| the start | {held:.0f} | 0 |")
            for name, forms in (
                ("searches", [b""] * options.searches),
                ("uploads", [upload(number, options.size) for number in range(options.uploads)]),
            ):
                for number, form in enumerate(forms):
                    ask(connection, WORDS[number % len(WORDS)], form)
                held = resident(service.pid)
                print(f"| {len(forms)} {name} | {held:.0f} | {sum(map(resident, below(service.pid))):.0f} |")
        finally:
            service.terminate()
    if ready > SECONDS or held > MEGABYTES:
        sys.exit(1)


if __name__ == "__main__":
    main()
