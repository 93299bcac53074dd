#!/usr/bin/env bash
# Installs the programs of the comparison from PyPI into DIR (default ~/.cache/shmserve-peers), without compiling anything:
# a real Triton Inference Server 2.51 (Python backend, CPU) and Triton's own load generator, perf_analyzer 2.51.
#   bench/peer_setup.sh [DIR]                         set up; a second call does nothing
#   bench/peer_setup.sh DIR analyzer                  set up perf_analyzer alone
#   bench/peer_setup.sh DIR triton REPOSITORY [flags] run that Triton by hand (default ports 8000, 8001, 8002)
#   bench/peer_setup.sh DIR perf [flags]              run that perf_analyzer by hand, e.g. -m simple -u 127.0.0.1:8000 -i http
# Needs Python 3.11, 0.5 GB of disk and, on Debian, libb64 for perf_analyzer (apt-get install libb64-0d).
set -euo pipefail
dir=$(realpath -m "${1:-$HOME/.cache/shmserve-peers}")
site=$dir/triton/lib/python3.11/site-packages
# The same Python as for shmserve, because its build strongly affects the speed of Python models.
python=$("$(dirname "$0")/../.ci/find-python")

analyzer() {
  [ -e "$dir/perf_analyzer" ] && return
  mkdir -p "$dir/dl" "$dir/lib"
  cd "$dir"
  [ -e triton ] || "$python" -m venv triton
  triton/bin/pip download -q --no-deps -d dl tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.9.79
  "$python" - <<'P'
import glob, os, shutil, zipfile

def take(wheel, suffix, to):
    with zipfile.ZipFile(glob.glob(wheel)[0]) as z:
        name = next(n for n in z.namelist() if n.endswith(suffix))
        with z.open(name) as src, open(to, "wb") as dst:
            shutil.copyfileobj(src, dst)
    os.chmod(to, 0o755)

take("dl/nvidia_cuda_runtime_cu12*.whl", "/libcudart.so.12", "lib/libcudart.so.12")
take("dl/tritonclient-2.51.0*.whl", "/bin/perf_analyzer", "perf_analyzer")
P
}

install() {
  [ -e "$dir/ready" ] && return
  mkdir -p "$dir/backends"
  cd "$dir"
  "$python" -m venv triton
  triton/bin/pip install -q nvidia-pytriton==0.7.0 'setuptools<81'
  analyzer
  cp -r "$site/pytriton/tritonserver/backends/." backends/
  cp "$site/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub" backends/python/
  touch ready
}

case "${2:-install}" in
  install) install ;;
  analyzer) analyzer ;;
  triton)
    repository=$(realpath "$3"); shift 3
    libpython=$("$dir/triton/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
    export PATH=$dir/triton/bin:$PATH VIRTUAL_ENV=$dir/triton
    export LD_LIBRARY_PATH=$site/nvidia_pytriton.libs:$libpython
    exec "$site/pytriton/tritonserver/bin/tritonserver" --model-repository="$repository" \
      --backend-directory="$dir/backends" --http-address=127.0.0.1 --grpc-address=127.0.0.1 "$@" ;;
  perf)
    shift 2
    LD_LIBRARY_PATH=$dir/lib exec "$dir/perf_analyzer" "$@" ;;
  *) echo "usage: $0 [DIR [analyzer | triton REPOSITORY | perf] [flags]]" >&2; exit 2 ;;
esac
