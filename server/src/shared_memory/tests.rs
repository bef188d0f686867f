use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tempfile::TempDir;

use super::*;

/// A folder in the place of `/dev/shm`.
struct Bench {
    folder: TempDir,
    memory: SharedMemory,
}

impl Bench {
    fn new(max_regions: usize, max_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let memory = SharedMemory {
            root: folder.path().to_owned(),
            ..SharedMemory::new(Some(SharedMemoryLimits {
                max_regions,
                max_bytes: ByteSize(max_bytes),
                key_prefixes: Vec::new(),
            }))
        };
        Self { folder, memory }
    }

    fn object(&self, key: &str, content: &[u8]) {
        fs::write(self.folder.path().join(key), content).unwrap();
    }

    fn content(&self, key: &str) -> Vec<u8> {
        fs::read(self.folder.path().join(key)).unwrap()
    }

    /// As everybody has them.
    fn regions(&self) -> Regions<'_> {
        self.memory.of(None)
    }

    #[track_caller]
    fn refused(&self, key: &str, slice: RegionSlice, expected: &str) {
        let error = self.regions().register(key, slice).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}

fn slice(region: &str, offset: u64, byte_size: u64) -> RegionSlice {
    RegionSlice {
        region: region.to_owned(),
        offset,
        byte_size,
    }
}

#[test]
fn only_keys_with_a_permitted_prefix_are_looked_for() {
    let mut bench = Bench::new(4, 100);
    let limits = bench.memory.limits.as_mut().unwrap();
    limits.key_prefixes = vec!["tensors-".to_owned(), "clip".to_owned()];
    for key in ["tensors-a", "clip", "other"] {
        bench.object(key, b"0123456789");
    }
    for key in ["/tensors-a", "clip"] {
        bench
            .regions()
            .register(key, slice(&key[1..], 0, 10))
            .unwrap();
    }
    for key in ["other", "/tensors", "absent"] {
        bench.refused(key, slice("r", 0, 10), "shared_memory.key_prefixes");
    }
}

#[test]
fn a_region_is_for_who_registered_it_and_for_who_manages() {
    let bench = Bench::new(4, 100);
    bench.object("k", b"0123456789");
    let known = |kind, name: &str, manages| Caller {
        identity: (kind, name.into()),
        manages,
    };
    let owner = known("token", "a", false);
    let operator = known("token", "operator", true);
    let others = [known("token", "b", false), known("jwt", "a", false)];
    let regions = |caller| bench.memory.of(Some(caller));
    regions(&owner).register("k", slice("r", 0, 10)).unwrap();
    for other in &others {
        let theirs = regions(other);
        let error = theirs.resolve(&slice("r", 0, 1)).unwrap_err();
        assert!(error.message().contains("unable to find"), "{error}");
        assert!(theirs.status("r").is_err());
        assert!(theirs.status("").unwrap().is_empty());
        for name in ["r", ""] {
            theirs.unregister(name).unwrap();
        }
    }
    for caller in [&owner, &operator] {
        assert!(regions(caller).resolve(&slice("r", 0, 1)).is_ok());
        assert_eq!(regions(caller).status("").unwrap().len(), 1);
    }
    regions(&operator).unregister("r").unwrap();
    assert!(regions(&owner).status("r").is_err());
}

#[test]
fn a_registered_region_is_read_and_written_where_the_request_says() {
    let bench = Bench::new(4, 100);
    bench.object("k", b"0123456789");
    bench.regions().register("/k", slice("r", 2, 6)).unwrap();
    let read = |offset, size| bench.regions().resolve(&slice("r", offset, size));
    assert_eq!(read(1, 3).unwrap().read().unwrap(), b"345");
    let placed = read(2, 4).unwrap().write("y", b"ab").unwrap();
    assert_eq!(placed, slice("r", 2, 2));
    assert_eq!(bench.content("k"), b"0123ab6789");
    let status = bench.regions().status("").unwrap();
    assert_eq!(
        status,
        [RegionStatus {
            name: "r".into(),
            key: "/k".into(),
            offset: 2,
            byte_size: 6
        }]
    );
    assert!(bench.regions().status("other").is_err());
}

#[test]
fn nothing_outside_a_region_is_reached() {
    let bench = Bench::new(4, 100);
    bench.object("k", b"0123456789");
    bench.regions().register("k", slice("r", 2, 6)).unwrap();
    for (offset, size) in [(7, 0), (0, 7), (6, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let error = bench
            .regions()
            .resolve(&slice("r", offset, size))
            .unwrap_err();
        assert!(error.message().contains("invalid offset"), "{error}");
    }
    let small = bench.regions().resolve(&slice("r", 0, 2)).unwrap();
    let error = small.write("y", b"abc").unwrap_err();
    assert!(error.message().contains("should be at least 3"), "{error}");
    assert_eq!(bench.content("k"), b"0123456789");
}

#[test]
fn only_objects_of_the_folder_itself_are_opened() {
    let bench = Bench::new(4, 100);
    bench.object("k", b"0123456789");
    let outside = tempfile::NamedTempFile::new().unwrap();
    symlink(outside.path(), bench.folder.path().join("link")).unwrap();
    symlink("k", bench.folder.path().join("inside")).unwrap();
    fs::create_dir(bench.folder.path().join("folder")).unwrap();
    for key in [
        "",
        "/",
        "..",
        ".",
        "../k",
        "folder/../k",
        "//k",
        "a\\b",
        "a\nb",
        "a\0b",
        "/etc/passwd",
    ] {
        bench.refused(key, slice("r", 0, 1), "cannot be the key");
    }
    for key in ["link", "inside", "folder", "absent"] {
        bench.refused(
            key,
            slice("r", 0, 1),
            "unable to open shared memory region 'r'",
        );
    }
    bench.refused("dormouse-1", slice("r", 0, 1), "kept for the server");
    bench.refused("k", slice("a/b", 0, 1), "cannot be the region name");
    bench.refused("k", slice(&"n".repeat(256), 0, 1), "255 bytes");
    bench.refused("k", slice("r", 0, 0), "byte_size is 0");
    bench.refused("k", slice("r", 0, 11), "which has 10");
    bench.refused("k", slice("r", u64::MAX, 1), "which has 10");
    bench.refused("k", slice("r", 1, u64::MAX), "which has 10");
}

#[test]
fn regions_are_bounded_in_number_and_in_bytes() {
    let bench = Bench::new(2, 12);
    bench.object("k", b"0123456789");
    bench.regions().register("k", slice("a", 0, 10)).unwrap();
    bench.refused("k", slice("a", 0, 1), "registered already");
    bench.refused("k", slice("b", 0, 3), "shared_memory.max_bytes");
    bench.regions().register("k", slice("b", 0, 2)).unwrap();
    bench.refused("k", slice("c", 0, 1), "shared_memory.max_regions");
    bench.regions().unregister("a").unwrap();
    bench.regions().unregister("never").unwrap();
    bench.regions().register("k", slice("c", 0, 10)).unwrap();
    bench.regions().unregister("").unwrap();
    assert!(bench.regions().status("").unwrap().is_empty());
}

#[test]
fn nothing_is_allowed_unless_it_is_said() {
    let memory = SharedMemory::default();
    assert!(memory.of(None).register("k", slice("r", 0, 1)).is_err());
    assert!(memory.of(None).status("").is_err());
    let error = memory.of(None).resolve(&slice("r", 0, 1)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unsupported);
}

#[test]
fn a_region_in_use_outlives_its_registration() {
    let bench = Bench::new(4, 100);
    bench.object("k", b"0123456789");
    bench.regions().register("k", slice("r", 0, 10)).unwrap();
    let held = bench.regions().resolve(&slice("r", 0, 10)).unwrap();
    bench.regions().unregister("r").unwrap();
    fs::remove_file(bench.folder.path().join("k")).unwrap();
    assert_eq!(held.read().unwrap(), b"0123456789");
    assert!(bench.regions().resolve(&slice("r", 0, 10)).is_err());
}

#[test]
fn an_object_cut_short_at_any_moment_is_an_error_of_one_request() {
    const SIZE: u64 = 1 << 20;
    let bench = Bench::new(4, SIZE);
    bench.object("k", &vec![7; SIZE as usize]);
    bench.regions().register("k", slice("r", 0, SIZE)).unwrap();
    let whole = bench.regions().resolve(&slice("r", 0, SIZE)).unwrap();
    let file = File::options()
        .write(true)
        .open(bench.folder.path().join("k"))
        .unwrap();
    file.set_len(0).unwrap();
    assert!(whole.read().unwrap_err().message().contains("which has 0"));
    let error = whole.write("y", &[1; 16]).unwrap_err();
    assert!(error.message().contains("which has 0"), "{error}");
    // And while it is being read and written.
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                file.set_len(0).unwrap();
                file.set_len(SIZE).unwrap();
            }
        });
        for _ in 0..300 {
            if let Ok(read) = whole.read() {
                assert_eq!(read.len() as u64, SIZE);
            }
            let _ = whole.write("y", &[1; 4096]);
        }
        done.store(true, Ordering::Relaxed);
    });
}
