"""A pipeline whose policies learn to add, by the policy gradient of their groups, without torch."""

from pathlib import Path

from tests import tiny_pipeline

PARAMS = """\
seed: 1
seconds: 0.0
evaluation: {rollouts: 32}
rounds:
  a-1: {start: base, updates: 40}
  a-2: {start: a-1, updates: 60}
"""

PIPELINE = """\
stages:
  prepare:
    cmd: python sums.py prepare artifacts/prompts/train.parquet artifacts/prompts/eval.parquet
    deps: [sums.py]
    params: [seed]
    outs: [artifacts/prompts/train.parquet, artifacts/prompts/eval.parquet]
  base:
    cmd: python sums.py base artifacts/prompts/train.parquet artifacts/policies/base
    deps: [sums.py, artifacts/prompts/train.parquet]
    outs: [artifacts/policies/base]
  evaluate-base:
    cmd: >-
      python sums.py evaluate artifacts/prompts/eval.parquet artifacts/policies/base
      artifacts/evaluations/base.parquet artifacts/evaluations/base.json
    deps: [sums.py, artifacts/prompts/eval.parquet, artifacts/policies/base]
    params: [seed, evaluation]
    outs: [artifacts/evaluations/base.parquet]
    metrics: [artifacts/evaluations/base.json]
  train:
    foreach: ${rounds}
    do:
      cmd: >-
        python sums.py ${key} artifacts/prompts/train.parquet artifacts/policies/${item.start}
        artifacts/policies/${key}
      deps: [sums.py, artifacts/prompts/train.parquet, "artifacts/policies/${item.start}"]
      params: [seed, seconds, "rounds.${key}"]
      outs: ["artifacts/policies/${key}"]
  evaluate:
    foreach: ${rounds}
    do:
      cmd: >-
        python sums.py evaluate artifacts/prompts/eval.parquet artifacts/policies/${key}
        artifacts/evaluations/${key}.parquet artifacts/evaluations/${key}.json
      deps:
        - sums.py
        - artifacts/prompts/eval.parquet
        - artifacts/policies/base
        - "artifacts/policies/${key}"
      params: [seed, evaluation]
      outs: ["artifacts/evaluations/${key}.parquet"]
      metrics: ["artifacts/evaluations/${key}.json"]
  report:
    cmd: python sums.py report artifacts/evaluations artifacts/report/metrics.json
    deps: [sums.py, artifacts/evaluations]
    metrics: [artifacts/report/metrics.json]
  lineage:
    cmd: python -m stages.lineage .
    deps: [artifacts/report/metrics.json, artifacts/policies]
"""

# A policy answers k with logit -exp(s) (k - u a - v b - w)^2: four numbers, true of sums never seen
# if u = v = 1 and w = 0.
SUMS = """\
import json, os, sys, time
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as parquet, yaml
from safetensors.numpy import load_file, save_file

DIGITS, GROUP, RATE = 8, 8, 0.01
BASE = [0.7, 0.7, 1.0, -1.5]  # u, v, w, s
ANSWERS = np.arange(2 * DIGITS - 1)
stage, *paths = sys.argv[1:]
paths = [Path(each) for each in paths]
params = yaml.safe_load(Path("params.yaml").read_text())
random = np.random.default_rng([params["seed"], *stage.encode()])

def mark(word):
    Path(".work").mkdir(exist_ok=True)
    with Path(".work/marks.txt").open("a") as file:
        file.write(f"{word} {stage} {time.time()} {os.getpid()}\\n")

def read_prompts(path):
    table = parquet.read_table(path)
    return np.stack([table["a"].to_numpy(), table["b"].to_numpy()], axis=1)

def read_policy(directory):
    return load_file(directory / "model.safetensors")["weights"]

def write_policy(weights, directory):
    directory.mkdir(parents=True)
    save_file({"weights": weights}, directory / "model.safetensors")

def errors_of(weights, prompts):
    return ANSWERS - (prompts @ weights[:2] + weights[2])[:, None]

def probabilities(weights, prompts):
    scores = np.exp(-np.exp(weights[3]) * errors_of(weights, prompts) ** 2)
    return scores / scores.sum(axis=1, keepdims=True)

def draw(weights, prompts, rollouts):
    limits = probabilities(weights, prompts).cumsum(axis=1)[:, None, :-1]
    answers = (random.random((len(prompts), rollouts, 1)) > limits).sum(axis=2)
    return answers, answers == prompts.sum(axis=1, keepdims=True)

def update(weights, prompts):
    answers, right = draw(weights, prompts, GROUP)
    advantage = right - right.mean(axis=1, keepdims=True)  # sums to 0: no term of the normalizer
    errors = np.take_along_axis(errors_of(weights, prompts), answers, axis=1)
    pull = 2 * np.exp(weights[3]) * (advantage * errors).sum(axis=1)
    sharpen = -np.exp(weights[3]) * (advantage * errors**2).sum()
    gradient = [*(pull @ prompts), pull.sum(), sharpen]
    return weights + RATE * np.array(gradient) / len(prompts)

mark("start")
print(f"working on {stage}")
for each in paths:
    each.parent.mkdir(parents=True, exist_ok=True)
if stage == "prepare":
    pairs = random.permutation([(a, b) for a in range(DIGITS) for b in range(DIGITS)])
    for path, part in zip(paths, (pairs[20:], pairs[:20])):
        parquet.write_table(pa.table({"a": part[:, 0], "b": part[:, 1]}), path)
elif stage == "base":
    write_policy(np.array(BASE), paths[1])
elif stage == "evaluate":
    prompts, rollouts = read_prompts(paths[0]), params["evaluation"]["rollouts"]
    policy = read_policy(paths[1])
    right = draw(policy, prompts, rollouts)[1].sum(axis=1)
    table = {
        "prompt_id": [f"{a}+{b}=" for a, b in prompts],
        "family": ["small" if total < DIGITS else "large" for total in prompts.sum(axis=1)],
        "greedy": (probabilities(policy, prompts).argmax(axis=1) == prompts.sum(axis=1)) * 1.0,
        "rollouts": np.full(len(prompts), rollouts),
        "successes": right,
    }
    parquet.write_table(pa.table(table), paths[2])
    paths[3].write_text(json.dumps({"mean_at_k": {"value": float(right.mean()) / rollouts}}))
elif stage == "report":
    means = {each.stem: json.loads(each.read_text()) for each in sorted(paths[0].glob("*.json"))}
    arms = {name: each for name, each in means.items() if name != "base"}
    paths[1].write_text(json.dumps({"k": 8, "base": means["base"], "arms": arms}))
    widths = {name: 200 * each["mean_at_k"]["value"] for name, each in means.items()}
    bars = "".join(
        f'<rect y="{20 * i}" width="{width}" height="16" fill="#37b"/>'
        f'<text x="{width + 4}" y="{20 * i + 13}">{name}</text>'
        for i, (name, width) in enumerate(widths.items())
    )
    figure = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 80">{bars}</svg>'
    paths[1].with_name("index.html").write_text(f"<h1>Sums, by policy</h1>{figure}")
else:
    time.sleep(params["seconds"])
    weights, prompts = read_policy(paths[1]), read_prompts(paths[0])
    for _ in range(params["rounds"][stage]["updates"]):
        weights = update(weights, prompts)
    write_policy(weights, paths[2])
mark("end")
"""


def rebuild(pristine: Path, root: Path) -> Path:
    """Creates it from a copy of the other tiny pipeline without artifacts; returns its root."""
    tiny_pipeline.copy(pristine, root)
    (root / "work.py").unlink()
    (root / "sums.py").write_text(SUMS)
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text(PIPELINE)
    (root / "prefect.yaml").write_text((tiny_pipeline.SOURCE / "prefect.yaml").read_text())
    with (root / ".gitignore").open("a") as ignored:
        ignored.write("/mlartifacts/\n/.s3/\n")
    tiny_pipeline.commit(root, "policies that learn")
    return root
