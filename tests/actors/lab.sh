#!/bin/bash
# A network of machines on this one, in namespaces of its own: lab.sh FOLDER MACHINES KEPT...
# The caller is 10.77.0.1, machines are 10.77.0.2 and so on, each with its processes, its address, sshd on port 22, the
# home folder FOLDER/home-N and a private /tmp/ray; FOLDER/shared is everybody's /mnt/raylt. The folders KEPT (of Python
# and of the project) stay in sight. Run it by `unshare --net --mount --pid --fork --kill-child --mount-proc`: when it
# ends, the kernel ends all that runs within.
set -euo pipefail
folder=$1 machines=$2
home=$(getent passwd "$(id -u)" | cut -d: -f6)      # ssh asks for this one, not for HOME
shift 2

live_in() {                             # the home folder of machine $1, with what is kept of the one that it hides
    mount --bind "$folder/home-$1" "$home"
    for kept in "${@:2}"; do
        case $kept in "$home"/*) mkdir -p "$kept" && mount --rbind "/mnt/home${kept#"$home"}" "$kept" ;; esac
    done
}

machine() {                             # within its own namespaces
    live_in "$@"
    until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
    ip link set lo up
    ip addr add "10.77.0.$1/24" dev eth0
    ip link set eth0 up
    ip route add default via 10.77.0.1
    hostname "node$1"
    mount -t tmpfs tmpfs /tmp/ray
    mount -t tmpfs tmpfs /run && mkdir /run/sshd
    /usr/sbin/sshd -D -e -f "$folder/sshd.conf" 2> "$folder/sshd-$1.log" &
    wait
}
if [ "$machines" = machine ]; then
    machine "$@"
    exit
fi

mount --make-rprivate /
mount -t tmpfs tmpfs /mnt && mkdir /mnt/raylt /mnt/tmp /mnt/home
mount --bind "$folder/shared" /mnt/raylt
mount --rbind "$home" /mnt/home
mount --rbind /tmp /mnt/tmp
mount -t tmpfs tmpfs /tmp && mkdir /tmp/ray
for kept in "$folder" "$@"; do          # what lies in the /tmp that is hidden now
    case $kept in /tmp/*) mkdir -p "$kept" && mount --rbind "/mnt$kept" "$kept" ;; esac
done
ip link set lo up
ip link add lab type bridge
ip addr add 10.77.0.1/24 dev lab
ip link set lab up
for number in $(seq 2 $((machines + 1))); do
    unshare --net --mount --pid --uts --fork --kill-child --mount-proc bash "$0" "$folder" machine "$number" "$@" &
    echo $! > "$folder/machine-$number.pid"
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
    ip link add "node$number" type veth peer name eth0 netns $!
    ip link set "node$number" master lab up
done
live_in 1 "$@"
touch "$folder/ready"
wait
