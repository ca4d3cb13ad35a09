#!/usr/bin/env bash
# Disable services that a training machine does not need, prevent upgrades, and remove the builder's keys and logs. Runs
# as root; a second run changes nothing.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh

# Logins use SSM. The running sshd continues, since Packer uses it, but does not start at the next boot.
for unit in ssh.service ssh.socket; do
    if [ -n "$(systemctl list-unit-files --no-legend "$unit" 2>/dev/null)" ]; then
        systemctl disable --quiet "$unit"
    fi
done
put 0600 /etc/ssh/sshd_config.d/90-baretrain.conf <<'EOF'
PasswordAuthentication no
PermitRootLogin no
EOF

# An upgrade during a run could remove the running kernel's driver.
put 0644 /etc/apt/apt.conf.d/90-baretrain <<'EOF'
APT::Periodic::Enable "0";
APT::Periodic::Unattended-Upgrade "0";
EOF
for unit in apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service; do
    if [ -n "$(systemctl list-unit-files --no-legend "$unit" 2>/dev/null)" ]; then
        systemctl mask --quiet "$unit"
    fi
done
hold '^linux-(image|headers|aws)'

# Remove what every machine must make for itself (host keys, machine id, random seed), and the builder's traces.
rm -f /etc/ssh/ssh_host_* /root/.bash_history /home/*/.bash_history /root/.ssh/authorized_keys
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed
if command -v cloud-init >/dev/null; then
    cloud-init clean --logs --seed
fi
apt-get clean
rm -rf /var/lib/apt/lists/* /tmp/baretrain
chmod 0755 /etc/baretrain
