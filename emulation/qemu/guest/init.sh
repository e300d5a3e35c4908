#!/busybox sh
# PID 1 of a guest: the host's own files as its root, read-only below a memory overlay; then what
# the host left for this guest in the shared folder; its exit status goes there, and power off.
PATH=/applets
/busybox mkdir -p /applets /proc /sys /dev /below /above /root
/busybox --install -s /applets
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod "/modules/$module" || echo "insmod $module failed"; done
for word in $(cat /proc/cmdline); do
  case $word in cxlkv.guest=*) guest=${word#*=} ;; esac
done
options=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o ro,cache=loose,$options host /below
mount -t tmpfs above /above
mkdir /above/files /above/work
mount -t overlay -o lowerdir=/below,upperdir=/above/files,workdir=/above/work root /root
for folder in proc sys dev run dev/shm dev/pts guest shared; do mkdir -p /root/$folder; done
for folder in proc sys dev; do mount --move /$folder /root/$folder; done
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run
mount -t devpts pts /root/dev/pts
mount -t 9p -o cache=none,$options shared /root/shared
cp -r /busybox /modules /root/guest/
echo "guest $guest is up after $(cut -d' ' -f1 /root/proc/uptime) s"
chroot /root /bin/sh /shared/$guest.sh
status=$?
echo "guest $guest ends after $(cut -d' ' -f1 /root/proc/uptime) s: status $status"
echo $status > /root/shared/$guest.status
/busybox sync
/busybox poweroff -f
