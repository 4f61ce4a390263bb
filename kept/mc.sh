cd $1; shift; export PYTHONPATH=.; export LD_LIBRARY_PATH=$(dirname $(find /tmp/vk13 -name 'libnvrtc-builtins.so.13.0'))
python tools/machine_code.py "$@"
