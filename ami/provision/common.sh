#!/usr/bin/env bash
# Set up what every image needs: packages, limits, time, host names, the machine's disks, a user. Runs as root; a second
# run changes nothing. Settings of the kernel take effect when a machine boots from the image.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh

if command -v cloud-init >/dev/null; then
    cloud-init status --wait >/dev/null || true # cloud-init also installs packages; it exits with 2 after warnings
fi

apt_install ca-certificates chrony curl gnupg gpgv kmod mdadm numactl pciutils procps python3 python3-venv xfsprogs

# EFA registers memory, and 32 ranks with loader workers open many files.
put 0644 /etc/security/limits.d/90-baretrain.conf <<'EOF'
* - memlock unlimited
* - nofile 1048576
* - nproc unlimited
root - memlock unlimited
root - nofile 1048576
root - nproc unlimited
EOF
put 0644 /etc/systemd/system.conf.d/90-baretrain.conf <<'EOF'
[Manager]
DefaultLimitMEMLOCK=infinity
DefaultLimitNOFILE=1048576
DefaultLimitNPROC=infinity
DefaultTasksMax=infinity
EOF

put 0644 /etc/sysctl.d/90-baretrain.conf <<'EOF'
net.core.somaxconn = 4096
EOF

# EC2's time service, which needs no route to the internet.
put 0644 /etc/chrony/sources.d/ec2.sources <<'EOF'
server 169.254.169.123 prefer iburst minpoll 4 maxpoll 4
EOF
systemctl enable --quiet chrony.service

# A machine with several network cards must resolve its name to the first card's address, as DNS does, so /etc/hosts
# must not override it.
put 0644 /etc/cloud/cloud.cfg.d/90-baretrain.cfg <<'EOF'
manage_etc_hosts: false
EOF
touch /etc/hosts
sed -i '/^127\.0\.1\.1[[:space:]]/d' /etc/hosts

# Join the instance stores, which are empty at the first boot, into one file system at /mnt/local for caches and
# checkpoints.
put 0755 /usr/local/sbin/baretrain-nvme <<'EOF'
#!/usr/bin/env bash
# Join this machine's NVMe disks and mount them at /mnt/local. Their content is lost when the machine stops.
set -euo pipefail
mkdir -p /run/baretrain /mnt/local
if ! mountpoint -q /mnt/local; then
    device=$(blkid -L baretrain || true) # made at an earlier boot
    if [ -z "$device" ]; then
        disks=()
        for model in /sys/class/block/nvme*n1/device/model; do
            grep -qs "Amazon EC2 NVMe Instance Storage" "$model" || continue
            disk=/dev/$(basename "${model%/device/model}")
            [ -n "$(lsblk -nro MOUNTPOINT "$disk" | tr -d '\n')" ] || disks+=("$disk") # the base image may use this disk
        done
        [ "${#disks[@]}" -gt 0 ] || exit 0
        device=${disks[0]}
        if [ "${#disks[@]}" -gt 1 ]; then
            device=/dev/md0
            mdadm --create "$device" --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
        fi
        mkfs.xfs -q -f -L baretrain "$device"
    fi
    mount -o noatime "$device" /mnt/local
fi
chmod 1777 /mnt/local
echo /mnt/local >/run/baretrain/nvme
EOF
put 0644 /etc/systemd/system/baretrain-nvme.service <<'EOF'
[Unit]
Description=This machine's own NVMe disks at /mnt/local
After=local-fs.target
Before=cloud-final.service

[Service]
Type=oneshot
ExecStart=/usr/local/sbin/baretrain-nvme
RemainAfterExit=yes

[Install]
WantedBy=multi-user.target
EOF
systemctl enable --quiet baretrain-nvme.service

# The user for logins through SSM. It has no password and no sudo.
id baretrain >/dev/null 2>&1 || useradd --create-home --shell /bin/bash baretrain
