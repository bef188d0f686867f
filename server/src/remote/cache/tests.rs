use super::*;

fn file(size: u64) -> RemoteFile {
    RemoteFile {
        path: "m/1/model.onnx".to_owned(),
        size,
        modified_ns: 0,
        tag: Some("t".to_owned()),
        generation: None,
    }
}

#[test]
fn a_part_goes_on_where_its_journal_ends() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path(), ByteSize::mib(1)).unwrap();
    let file = file(250);
    let key = Key::of("r", &file);
    let mut part = cache.begin(&key, &file, 100).unwrap().unwrap();
    part.writer().write(&[1; 100], 100).unwrap();
    part.written(1, 100).unwrap();
    part.keep().unwrap();
    // Written, but nobody said so before the end.
    part.writer().write(&[1; 100], 0).unwrap();
    drop(part);
    let part = cache.begin(&key, &file, 100).unwrap().unwrap();
    assert_eq!(part.missing(), [(0, 0..100), (2, 200..250)]);
    drop(part);
    // Other parts than before: all of it comes anew.
    let part = cache.begin(&key, &file, 50).unwrap().unwrap();
    assert_eq!(part.missing().len(), 5);
    assert!(cache.find(&key).is_none());
}

#[test]
fn of_a_part_that_is_whole_one_piece_is_asked_for_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path(), ByteSize::mib(1)).unwrap();
    let file = file(250);
    let key = Key::of("r", &file);
    let mut part = cache.begin(&key, &file, 100).unwrap().unwrap();
    for index in 0..3 {
        part.written(index, 100).unwrap();
    }
    part.keep().unwrap();
    drop(part);
    // Nobody has compared it with the digest that its server tells.
    let part = cache.begin(&key, &file, 100).unwrap().unwrap();
    assert_eq!(part.missing(), [(2, 200..250)]);
}

#[test]
fn only_a_whole_file_becomes_a_copy() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(folder.path(), ByteSize::mib(1)).unwrap();
    let file = file(3);
    let key = Key::of("r", &file);
    let part = cache.begin(&key, &file, 100).unwrap().unwrap();
    part.writer().write(b"abc", 0).unwrap();
    assert!(!cache.has(&key));
    let md5 = Some([
        0x90, 0x01, 0x50, 0x98, 0x3c, 0xd2, 0x4f, 0xb0, 0xd6, 0x96, 0x3f, 0x7d, 0x28, 0xe1, 0x7f,
        0x72,
    ]);
    let right = Expected { sha256: None, md5 };
    assert!(part.is(&right).unwrap());
    let wrong = Expected {
        sha256: Some("0".repeat(64)),
        md5: None,
    };
    assert!(!part.is(&wrong).unwrap());
    cache.finish(&key, "r", &file, part).unwrap();
    assert!(cache.has(&key));
    assert!(cache.find(&key).is_some());
    assert!(cache.begin(&key, &file, 100).unwrap().is_none());
    assert_eq!(cache.size(), 3);
    let other = RemoteFile {
        tag: Some("u".to_owned()),
        ..file
    };
    assert!(cache.find(&Key::of("r", &other)).is_none());
    assert!(cache.find(&Key::of("s", &other)).is_none());
}
