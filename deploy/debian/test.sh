#!/usr/bin/env bash
# Runs `make test` in fresh roots of Debian 12 and 13, each with its own Python, and prints the last line of each. It needs root
# and debootstrap. Installing uses the network; the tests run in a network namespace that has only loopback.
# From the environment: RELEASES, TARGETS (of make), ROOTS (a directory that keeps the roots), MIRROR, the PIP_… variables, and
# VOLUMES: directories of this machine to mount in the roots, separated by spaces (pip's cache, a directory of wheels).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RELEASES="${RELEASES:-bookworm trixie}"
TARGETS="${TARGETS:-test}"
PACKAGES=ca-certificates,curl,git,iproute2,make,openssl,python3-venv
[ "$(id -u)" = 0 ] || { echo "test.sh: making a root wants root" >&2; exit 1; }
command -v debootstrap > /dev/null || { apt-get update -qq; apt-get install --yes -qq --no-install-recommends debootstrap; }
if [ -z "${ROOTS:-}" ]; then ROOTS=$(mktemp -d); trap 'rm -rf "$ROOTS"' EXIT; fi

# inside ROOT COMMAND [options of unshare]: mounts and processes end with the command.
inside() {
    unshare --mount --pid --fork --kill-child "${@:3}" bash -euc '
        mount -t proc proc "$1/proc"
        for volume in /dev $3; do mkdir -p "$1$volume"; mount --rbind "$volume" "$1$volume"; done
        exec chroot "$1" bash -euc "cd /src; $2"' bash "$1" "$2" "${VOLUMES:-}"
}

for release in $RELEASES; do
    root="$ROOTS/$release"
    if [ ! -e "$root/.made" ]; then
        debootstrap --variant=minbase --include="$PACKAGES" "$release" "$root" "${MIRROR:-http://deb.debian.org/debian}"
        touch "$root/.made"
    fi
    cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
    rm -rf "$root/src.new"
    git clone --quiet . "$root/src.new"
    mkdir -p "$root/src"
    # Installed packages stay; the source tree is replaced by this commit's.
    find "$root/src" -mindepth 1 -maxdepth 1 ! -name '.venv*' ! -name .layers -exec rm -rf {} +
    mv "$root/src.new/"* "$root/src.new/".[!.]* "$root/src/"
    inside "$root" "make install-test"
    echo "== $release: $(inside "$root" 'python3 --version; git rev-parse --short HEAD' | paste -sd ' ')"
    inside "$root" "ip link set lo up; make $TARGETS" --net
done
