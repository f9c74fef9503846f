"""A worker without attention, for the tests of how workers are asked.

    python -m tests.bench.fake_worker SETTINGS

A subject is named for what it does; the request's `seconds` is how long a call takes.
"""

import json
import os
import sys
import time

from jax_flash_metal import bench, bench_worker


class Fake(bench_worker.Subject):
    def __init__(self, name):
        self._name = name
        self._calls = 0

    def load(self):
        if self._name == "missing":
            raise ImportError("there is no such package\nand more lines")
        print("a library greets", flush=True)  # must not be taken for an answer
        os.write(1, b"from C too\n")
        return {"fake": "1.0"}

    def prepare(self, case):
        self._seconds = case["seconds"]
        facts = {"memory_bytes": 1000, "runs": f"{bench.num_cpus()} CPUs"}
        error = {"wrong": 0.5, "nan": float("nan")}.get(self._name, 1e-6)
        return facts | {"error": error, "tolerance": 1e-3}

    def call(self):
        self._calls += 1
        if self._name == "hanging":
            time.sleep(60)
        if self._name == "crashing" and self._calls > 2:
            print("a last word", file=sys.stderr, flush=True)
            os.abort()
        time.sleep(2 * self._seconds if self._name == "slow" else self._seconds)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    bench_worker.serve(lambda: Fake(settings["subject"]), settings)
