"""kvshard's end-to-end cases on servers of sglang, as a file of sglang's own CI: copy it below test/registered/.

Needs kvshard (pip install kvshard) and a topology: KV_SHARDING_TOPOLOGY, or kv_sharding.toml beside this file. It names
the servers with their flags; sglang_p2d2_gqa.toml of kvshard has prefill with context parallel 2, a sharded cache and a
host tier. A worker named `control` is what answers are compared with. KV_SHARDING_PROMISES are those of the address.
"""

import json
import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=420, stage="extra-b", runner_config="4-gpu-h100")

TOPOLOGY = Path(os.environ.get("KV_SHARDING_TOPOLOGY") or Path(__file__).with_name("kv_sharding.toml"))
PROMISES = os.environ.get("KV_SHARDING_PROMISES", "-seeded,-rank_processes")
KVSHARD = [sys.executable, "-m", "harness.cli"]
STOP_SECONDS = 60


class TestKvShardingEndToEnd(CustomTestCase):
    """`process` runs all servers and ends when one of them does, which ends the run."""

    process: "subprocess.Popen[str] | None" = None
    address = ""

    @classmethod
    def setUpClass(cls) -> None:
        """Servers up, and the address of the cases."""
        cls.process = subprocess.Popen([*KVSHARD, "up", str(TOPOLOGY)], stdout=subprocess.PIPE, text=True)
        line = cls.process.stdout.readline() if cls.process.stdout else ""  # comes once all are ready
        if not line:
            raise RuntimeError(f"kvshard up {TOPOLOGY} exited with {cls.process.wait()}; its last lines are above")
        urls = json.loads(line)["urls"]
        options = [f"{role}={urls[role]}" for role in ("prefill", "decode", "control") if role in urls]
        cls.address = f"{urls.get('decode', json.loads(line)['entry'])}?{'&'.join([*options, f'promises={PROMISES}'])}"

    @classmethod
    def tearDownClass(cls) -> None:
        """Servers down."""
        if cls.process is not None:
            cls.process.send_signal(signal.SIGINT)
            cls.process.communicate(timeout=STOP_SECONDS)

    def run_cases(self, keyword: str) -> None:
        """Exit code 0: all cases passed that these servers can do. 2 is not proven, which is no pass either."""
        words = [*KVSHARD, "run", self.address, "--suite", "e2e", "--budget", "smoke", "-k", keyword]
        self.assertEqual(0, subprocess.run(words, check=False).returncode, f"kvshard run -k {keyword!r}; see above")

    def test_parity(self) -> None:
        """Answers and scores are the control arm's."""
        self.run_cases("parity")

    def test_cache(self) -> None:
        """What comes from the cache is what would have been computed, and as much as was kept."""
        self.run_cases("cache")

    def test_host_tier(self) -> None:
        """What left the device comes back to the right ranks."""
        self.run_cases("host")

    def test_ends(self) -> None:
        """Requests that do not come to their end leave nothing behind; floods are answered."""
        self.run_cases("abort or flush or load")


if __name__ == "__main__":
    unittest.main()
