#!/busybox sh
# PID 1 of a guest: the host's own files as its root, read-only below a memory overlay; then what
# the host left for this guest in the shared folder; its exit status goes there, and power off.
PATH=/applets
/busybox mkdir -p /applets /proc /sys /dev /below /above /merged
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
mount -t overlay -o lowerdir=/below,upperdir=/above/files,workdir=/above/work root /merged
for folder in proc sys dev run dev/shm dev/pts guest shared; do mkdir -p /merged/$folder; done
for folder in proc sys dev; do mount --move /$folder /merged/$folder; done
mkdir -p /merged/dev/shm /merged/dev/pts
mount -t tmpfs shm /merged/dev/shm
mount -t tmpfs run /merged/run
mount -t devpts pts /merged/dev/pts
mount -t 9p -o cache=none,$options shared /merged/shared
cp -r /busybox /modules /merged/guest/
echo "guest $guest is up after $(cut -d' ' -f1 /merged/proc/uptime) s"
chroot /merged /bin/sh /shared/$guest.sh
status=$?
echo "guest $guest ends after $(cut -d' ' -f1 /merged/proc/uptime) s: status $status"
echo $status > /merged/shared/$guest.status
/busybox sync
/busybox poweroff -f
