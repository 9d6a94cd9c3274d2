#!/usr/bin/env bash
# stand_in.sh NAME DIRECTORY: makes a base image if none can be pulled: Debian bookworm with its Python 3.11, by debootstrap.
#
# The image has this machine's certificates and pip settings, so that the Dockerfile needs neither. DIRECTORY/volumes lists the
# paths on this disk that those settings name (wheels, a mirror), as PATH:PATH:ro for build.sh. MIRROR is Debian's by default.
set -euo pipefail

name=$1
mkdir -p "$2"
directory=$(cd "$2" && pwd)
root=$directory/root
if [ ! -e "$root.done" ]; then
    rm -rf "$root"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" \
        "${MIRROR:-http://deb.debian.org/debian}" > "$directory/debootstrap.log"
    # Like the slim images: no package lists, no archives, no manuals.
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info} "$root"/var/log/*
    touch "$root.done"
fi
cp --dereference /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
# pip's settings from files and from the environment, as one file.
python3 - "$root/etc/pip.conf" "$directory/volumes" << 'END'
import ast, os, pathlib, subprocess, sys
told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
settings = {}
for line in sorted(told.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment has the last word
    key, _, value = line.partition("=")
    settings[key.rpartition(".")[2]] = ast.literal_eval(value)
pathlib.Path(sys.argv[1]).write_text("[global]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in settings.items()))
words = [word for value in settings.values() for word in value.split()]
# The files of an index on disk lie beside it; of a file (constraints) the folder is mounted.
folders = set()
for word in words:
    path = word.removeprefix("file://")
    if path.startswith("/") and os.path.exists(path):
        folders.add(os.path.dirname(path) if word.startswith("file://") or os.path.isfile(path) else path)
pathlib.Path(sys.argv[2]).write_text("".join(f"{path}:{path}:ro\n" for path in sorted(folders)))
END
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / > /dev/null
buildah config --cmd /bin/sh "$container"
buildah commit --quiet --rm "$container" "$name" > /dev/null
echo "$name: $(du --summarize --human-readable "$root" | cut -f1)"
