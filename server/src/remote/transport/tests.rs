use http::HeaderValue;

use super::*;

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
        .collect()
}

/// Of no bytes at all.
const EMPTY: [u8; 16] = [
    0xd4, 0x1d, 0x8c, 0xd9, 0x8f, 0x00, 0xb2, 0x04, 0xe9, 0x80, 0x09, 0x98, 0xec, 0xf8, 0x42, 0x7e,
];

#[test]
fn digests_are_found_where_each_cloud_puts_them() {
    let found = |pairs: &[_]| expected_md5(&headers(pairs), true).map(|md5| md5.0);
    let tag = ("etag", "\"d41d8cd98f00b204e9800998ecf8427e\"");
    assert_eq!(found(&[tag]), Some(EMPTY));
    assert_eq!(
        found(&[("etag", "\"d41d8cd98f00b204e9800998ecf8427e-2\"")]),
        None
    );
    assert_eq!(
        found(&[tag, ("x-amz-server-side-encryption", "aws:kms")]),
        None
    );
    let aws = ("server", "AmazonS3");
    assert_eq!(
        found(&[tag, aws, ("x-amz-server-side-encryption", "AES256")]),
        Some(EMPTY)
    );
    assert_eq!(
        found(&[(
            "x-goog-hash",
            "crc32c=AAAAAA==,md5=1B2M2Y8AsgTpgAmY7PhCfg=="
        )]),
        Some(EMPTY)
    );
    assert_eq!(
        found(&[("x-ms-blob-content-md5", "1B2M2Y8AsgTpgAmY7PhCfg==")]),
        Some(EMPTY)
    );
    assert_eq!(expected_md5(&headers(&[tag]), false), None);
}

#[test]
fn a_redirect_is_joined_to_where_it_came_from() {
    let from: Uri = "https://a.example/x/y".parse().unwrap();
    let joined = |target| join(&from, target).map(|uri| uri.to_string());
    assert_eq!(joined("/z").unwrap(), "https://a.example/z");
    assert_eq!(
        joined("https://b.example/z").unwrap(),
        "https://b.example/z"
    );
    assert!(joined("z").is_err());
    assert!(joined("//b.example/z").is_err());
}
