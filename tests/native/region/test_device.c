/* Goal: what sysfs says of a dax device is read right, and a device that cannot be used is refused
 * by name, with the command that mends it.
 * Method: a folder that looks like /sys, as recorded from Linux 6.12. A device that is none is in
 * tests/machine/test_regions.py, the true driver is held by `make test-drivers`. */
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "check.h"
#include "region/device.h"

static char root[256];

static char *below(const char *name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    return path;
}

static void folder(const char *name) { CHECK(mkdir(below(name), 0700) == 0); }

static void file(const char *name, const char *text) {
    FILE *out = fopen(below(name), "w");
    CHECK(out && fputs(text, out) >= 0 && fclose(out) == 0);
}

static void link_to(const char *name, const char *target) {
    unlink(below(name));
    if (target) CHECK(symlink(target, below(name)) == 0);
}

static void make_sysfs(void) {
    folder("");
    folder("dev");
    folder("dev/char");
    folder("dax0.0");
    link_to("dev/char/252:3", "../../dax0.0");
    link_to("dax0.0/subsystem", "../bus/dax");
    file("dax0.0/size", "268435456\n");
    file("dax0.0/align", "2097152\n");
    file("dax0.0/target_node", "1\n");
    folder("tty0");
    link_to("dev/char/4:0", "../../tty0");
    link_to("tty0/subsystem", "../class/tty");
}

static void test_facts(void) {
    device_facts facts;
    link_to("dax0.0/driver", "../bus/dax/drivers/device_dax");
    CHECK(device_look(root, makedev(252, 3), &facts));
    CHECK(strcmp(facts.name, "dax0.0") == 0 && strcmp(facts.driver, "device_dax") == 0);
    CHECK(facts.bytes == 256u << 20 && facts.unit_bytes == 2u << 20 && facts.node == 1);
    file("dax0.0/align", "1073741824\n");
    file("dax0.0/size", "0\n");
    CHECK(device_look(root, makedev(252, 3), &facts));
    CHECK(facts.bytes == 0 && facts.unit_bytes == 1u << 30);
    CHECK(!device_look(root, makedev(4, 0), &facts));   /* another subsystem */
    CHECK(!device_look(root, makedev(252, 9), &facts)); /* not there, as where sysfs is masked */
}

static bool said(const char *text) { return strstr(cxlkv_error_text(), text) != NULL; }

static void test_refusals(void) {
    link_to("dax0.0/driver", NULL);
    CHECK(device_refused(root, "/dev/far", makedev(252, 3)) == -ENXIO);
    CHECK(said("/dev/far: no driver is bound") &&
          said("daxctl reconfigure-device --mode=devdax dax0.0"));
    link_to("dax0.0/driver", "../bus/dax/drivers/kmem");
    CHECK(device_refused(root, "/dev/far", makedev(252, 3)) == -ENXIO);
    CHECK(said("/dev/far is system RAM now (driver kmem, NUMA node 1)") &&
          said("daxctl reconfigure-device --mode=devdax --force dax0.0"));
    CHECK(device_refused(root, "/dev/tty9", makedev(4, 9)) == -ENXIO);
    CHECK(said("/dev/tty9: cannot open: no driver serves this device") && !said("daxctl"));
}

int main(void) {
    snprintf(root, sizeof(root), "/tmp/cxlkv-sysfs-%d", getpid());
    make_sysfs();
    test_facts();
    test_refusals();
    char command[300];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    CHECK(system(command) == 0);
    return 0;
}
