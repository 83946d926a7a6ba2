"""What each extra opens, as words of python that `bench/installs.py` runs in an environment with that extra."""

from __future__ import annotations

from collections.abc import Callable

PHOTOS = """
from pathlib import Path
from PIL import Image
for place, number in (("photos", 8), ("more", 2)):
    Path(place).mkdir()
    for n in range(number):
        Image.new("RGB", (64, 48), (30 * n, 60, 200)).save(f"{place}/{n}.jpg")
        Path(f"{place}/{n}.txt").write_text(f"a plain image of colour number {n}")
"""
SEARCH = """
import subprocess, sys
from urllib.request import urlopen
words = [sys.executable, "-m", "kiloword"]
subprocess.run([*words, *"index photos --model clip/model --out library --device cpu".split()], check=True)
server = subprocess.Popen([*words, "serve", "library", "--port", "0"], stdout=subprocess.PIPE, text=True)
address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
assert b"/thumb/" in urlopen(f"{address}?q=dog").read()
server.terminate()
"""
RAY = """
from pathlib import Path
import kiloword, ray
class Embed:
    def __init__(self, model):
        self.model = kiloword.load(model)
    def __call__(self, batch):
        return {"vec": self.model.encode_image(list(batch["bytes"]))["vec"].numpy()}
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
photos = ray.data.read_binary_files("photos", file_extensions=["jpg"])
out = photos.map_batches(Embed, fn_constructor_args=["MODEL"], batch_size=4, concurrency=1)
assert all(len(row["vec"]) for row in out.take_all())
"""
S3 = '''
"""A bucket on the loopback: `stat` and ranges of one tar."""
import http.server, io, os, re, sys, tarfile, threading
from pathlib import Path
body = io.BytesIO()
with tarfile.open(fileobj=body, mode="w") as tar:
    for path in sorted(Path("photos").iterdir()):
        tar.add(path, path.name)
body = body.getvalue()
class Bucket(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        found = self.path.partition("?")[0] == "/bucket/photos.tar"
        asked = re.match(r"bytes=(\\d+)-(\\d*)", self.headers.get("Range") or "")
        start, stop = (int(asked[1]), int(asked[2] or len(body) - 1) + 1) if asked else (0, len(body))
        part = body[start:stop] if found else b""
        self.send_response(206 if found and asked else 200 if found else 404)
        self.send_header("Content-Length", str(len(part)))
        if asked and found:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(body)}")
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(part if self.command == "GET" else b"")
    do_HEAD = do_GET
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}", "AWS_ACCESS_KEY_ID": "a",
               "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1", "KILOWORD_CACHE": "cache"}
from kiloword.data.open import open_source
source = open_source("s3://bucket/photos.tar")
import gcsfs, huggingface_hub
assert len(source) == 8 and source.record(3).captions[0].endswith("number 3")
'''
OFFLINE = "import os, sys; os.environ |= {}; sys.argv = {!r}.split(); from kiloword.cli.main import main; main()"
TRAIN = "kiloword train siglip --data photos --size debug --vocab 300 --batch 4 --steps 2 "


def code(text: str) -> str:
    """The words of a script that one argument holds."""
    return "-c '" + text.replace("'", "'\"'\"'") + "'"


def verb(words: str) -> str:
    return f"-m {words}"


def tracked(kind: str, variables: dict[str, str]) -> str:
    return code(OFFLINE.format(variables, f"{TRAIN}--log-to {kind} --out {kind}-run"))


USES: dict[str, tuple[str, ...]] = {  # extra -> words of python
    "openclip": (
        verb("kiloword export open_clip clip/model --out open-clip"),
        verb(f"{TRAIN}--image-tower open_clip:ViT-B-32 --freeze none --batch 2 --out open-clip-run"),
    ),
    "hf": (
        verb("kiloword export transformers clip/model --out hf"),
        verb("kiloword embed hf:hf --data photos --out from-hf"),
    ),
    "timm": (verb(f"{TRAIN}--image-tower timm:test_vit --freeze none --out timm-run"),),
    "onnx": (verb("kiloword export onnx clip/model --out onnx"),),
    "sentence-transformers": (verb("kiloword export sentence-transformers clip/model --out sentences"),),
    "eval": (
        verb('kiloword eval caption coca/model --data "scenes:test?n=4" --judge.tokenizer ptb --json captions.json'),
        code('import json; assert "meteor" in json.load(open("captions.json"))'),
    ),
    "fast": (verb(f"{TRAIN}--decoder simplejpeg --out simplejpeg-run"),),
    "remote": (code(S3),),
    "search": (code(SEARCH),),
    "ray": (code(RAY.replace('"MODEL"', 'str(Path("clip/model").resolve())')),),
    "log": (
        verb(f"{TRAIN}--log-to tensorboard --out tensorboard-run"),
        code('from pathlib import Path; assert list(Path("tensorboard-run").rglob("events.out.*"))'),
    ),
    "wandb": (tracked("wandb", {"WANDB_MODE": "offline"}),),
    "mlflow": (tracked("mlflow", {"MLFLOW_TRACKING_URI": "mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}),),
    "photos": (verb(f"{TRAIN}--image-tower efficientnet-lite0 --text-tower minilm --out photos-run"),),
}


# Whose absence no message of an extra tells: users of Ray import it themselves; messages of towers name the packages
# of their weights.
SILENT = ("ray", "photos")


def prepared(run: Callable[[str], str]) -> None:
    """Photos with captions, and models of clip and coca, made by the environment at hand."""
    run(code(PHOTOS))
    small = '--data "scenes?n=64" --size debug --vocab 300 --batch 8 --steps 2'
    for method in ("clip", "coca"):
        run(f"-m kiloword train {method} {small} --out {method}")
