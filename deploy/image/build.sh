#!/usr/bin/env bash
# Builds the Dockerfile with docker or buildah, whichever works on this machine, and prints the size of the image.
# From the environment: IMAGE (its name), BASE, LOCK, INDEX_URL, EXTRA_INDEX_URL (the Dockerfile's arguments, if set),
# BUILDER, and VOLUMES: further paths that the build may read, as PATH:PATH:ro, separated by spaces (only buildah supports this).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

IMAGE="${IMAGE:-attention-service:latest}"
if [ -z "${BUILDER:-}" ]; then
    if docker info > /dev/null 2>&1; then BUILDER=docker; else BUILDER=buildah; fi
fi
command -v "$BUILDER" > /dev/null || { echo "build.sh: neither a docker engine nor buildah is here" >&2; exit 1; }

arguments=(--file Dockerfile --tag "$IMAGE")
argument() { arguments+=(--build-arg "$1=$2"); }
for name in BASE LOCK INDEX_URL EXTRA_INDEX_URL; do
    if [ -n "${!name+set}" ]; then argument "$name" "${!name}"; fi
done
case "${BASE:-}" in
    *@sha256:* | localhost/*) ;;
    *) echo "build.sh: the base is a tag, which may move; BASE=NAME@sha256:… is the same one every time" >&2 ;;
esac
argument VERSION "$(sed -n 's/^__version__ = "\(.*\)"/\1/p' service/__init__.py)"
argument REVISION "$(git rev-parse HEAD 2> /dev/null || true)"
argument SOURCE "${SOURCE:-}"
argument CREATED "$(date --utc --date="@${SOURCE_DATE_EPOCH:-$(date +%s)}" +%Y-%m-%dT%H:%M:%SZ)"

if [ "$BUILDER" = docker ]; then
    docker build --platform linux/amd64 "${arguments[@]}" .  # the locks have the hashes of torch for x86-64
    docker image inspect --format '{{.Size}}' "$IMAGE"
else
    for volume in ${VOLUMES:-}; do arguments+=(--volume "$volume"); done
    # The health check and the stop signal are fields of Docker's format, not of the OCI format.
    buildah build --layers --format docker --isolation "${BUILDAH_ISOLATION:-chroot}" --pull=false "${arguments[@]}" .
    buildah images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$IMAGE"
fi
