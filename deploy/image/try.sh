#!/usr/bin/env bash
# Builds the image and tests it on a container engine (tests/image). From the environment: the variables of build.sh, and KEEP=1
# to keep the image and its storage in build/image, so that the next run is quicker.
#
# A docker engine is used if there is one. Otherwise buildah builds, and podman with runc runs, in a storage of their own. Then
# the base is the substitute of stand_in.sh, unless BASE names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export IMAGE="${IMAGE:-localhost/attention-service:try}"
place=$PWD/build/image
mkdir -p "$place"
if docker info > /dev/null 2>&1; then
    export ENGINE=docker BUILDER=docker
else
    export ENGINE=podman BUILDER=buildah BUILDAH_ISOLATION=chroot
    for program in buildah podman runc debootstrap; do
        command -v "$program" > /dev/null || { echo "try.sh: $program is missing: apt-get install buildah podman runc debootstrap" >&2; exit 1; }
    done
    # An overlay needs kernel support and root; vfs copies files, which works anywhere.
    if [ -z "${STORAGE_DRIVER:-}" ]; then
        if [ "$(id -u)" = 0 ] && grep --quiet overlay /proc/filesystems; then STORAGE_DRIVER=overlay; else STORAGE_DRIVER=vfs; fi
    fi
    printf '[storage]\ndriver = "%s"\ngraphroot = "%s"\nrunroot = "%s"\n' \
        "$STORAGE_DRIVER" "$place/storage" "$place/run" > "$place/storage.conf"
    unset STORAGE_DRIVER
    # Without systemd, and with no limit above this machine's own (these engines lower the second one themselves).
    at_most() { if [ "$1" = unlimited ] || [ "$1" -gt "$2" ]; then echo "$2"; else echo "$1"; fi; }
    files=$(at_most "$(ulimit -Hn)" 1048576)
    processes=$(at_most "$(ulimit -Hu)" 32768)
    cat > "$place/containers.conf" << END
[containers]
default_ulimits = ["nofile=$files:$files", "nproc=$processes:$processes"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
END
    export CONTAINERS_STORAGE_CONF=$place/storage.conf CONTAINERS_CONF=$place/containers.conf DISABLE_HC_SYSTEMD=true
    if [ -z "${BASE:-}" ]; then
        # The substitute base has pip's settings, which name the indexes.
        export BASE=localhost/attention-stand-in:bookworm EXTRA_INDEX_URL=${EXTRA_INDEX_URL-}
        if [ ! -e "$place/volumes" ] || ! podman image exists "$BASE"; then deploy/image/stand_in.sh "$BASE" "$place"; fi
        VOLUMES=$(tr '\n' ' ' < "$place/volumes") && export VOLUMES
    fi
fi
clean() {
    if [ "$ENGINE" = podman ] && [ -z "${KEEP:-}" ]; then
        podman rm --all --force > /dev/null
        podman rmi --all --force > /dev/null
        rm -rf "$place"
    fi
}
trap clean EXIT

started=$(date +%s)
deploy/image/build.sh
echo "built in $(($(date +%s) - started)) s"
"${PYTHON:-.venv/bin/python}" -m pytest -m image tests/image "$@"
