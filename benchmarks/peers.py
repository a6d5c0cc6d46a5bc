"""Time per plan of other cost models, run by an interpreter that has them installed.

They are no dependency of this package: ``pip install dlcalc llm-analysis`` into an environment of
their own, and give that environment's interpreter to ``benchmarks/speed.py --peers``. Both price
a dense model of 40 layers of width 5120 under one plan again and again: what is timed
is a call of their public entry points, with their output thrown away.
"""

from __future__ import annotations

import subprocess

LLM_ANALYSIS = """
import logging, time
from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
from llm_analysis.config import (
    ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name)
logging.disable(logging.CRITICAL)
model = ModelConfig("dense-13b", 40, 40, 5120, 32000, max_seq_len=2048, ffn_embed_dim=20480)
gpu, dtype = get_gpu_config_by_name("h100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
def price():
    plan = ParallelismConfig(tp_size=8, pp_size=2, dp_size=2, sp_size=8)
    LLMAnalysis(model, gpu, dtype, plan).training(
        batch_size_per_gpu=1, global_batch_size=32, seq_len=2048, total_num_tokens=10**12,
        activation_recomputation=ActivationRecomputation.SELECTIVE)
"""

DLCALC = """
import contextlib, io, os, sys, tempfile, time
import yaml
from dlcalc import training_3d
given = {
    "data": {"seqlen": 2048, "microbatch_sz": 1, "gbs": 32},
    "model": {"n_layers": 40, "hidden_sz": 5120, "inter_sz": 13824, "n_q_heads": 40,
              "n_kv_heads": 40, "head_dim": 128, "glu": True, "rotary_embeds": True,
              "dropout": False, "vocab_sz": 32000, "tie_embeddings": False},
    "parallelism": {"tp": 8, "pp": 2, "dp": 2, "vpp": 1, "cp": 1, "sp": True, "zero_level": 1,
                    "bucket_size_mb": 250, "n_param_buckets": 5},
    "performance": {"activation_checkpointing_type": "selective"},
    "hardware": {"node_type": "p5.48xlarge"},
}
path = os.path.join(tempfile.mkdtemp(), "plan.yaml")
with open(path, "w") as file:
    yaml.safe_dump(given, file)
sys.argv = ["3dtrn", path]
def price():
    with contextlib.redirect_stdout(io.StringIO()):
        training_3d.main()
"""

MEASURE = """
price()
n, start = 0, time.perf_counter()
while n < 20 or time.perf_counter() - start < 1.0:
    price()
    n += 1
print((time.perf_counter() - start) / n)
"""

PEERS = {"llm-analysis": LLM_ANALYSIS, "dlcalc": DLCALC}


def seconds_per_plan(interpreter: str, name: str) -> float | str:
    """Return the time that a peer takes for one plan [s], or a sentence that says why it has none.

    Parameters
    ----------
    interpreter : str
        Path of a Python that has the peer installed.
    name : str
        A key of `PEERS`.
    """
    try:
        run = subprocess.run(
            [interpreter, "-c", PEERS[name] + MEASURE],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} was not run: {error}"
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        why = (run.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return f"{name} was not run: {why}"
    return float(lines[-1])
