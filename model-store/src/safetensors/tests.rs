use expect_test::{Expect, expect};
use proptest::collection::vec;
use proptest::prelude::*;

use super::writer::{file, padded, with_header};
use super::*;

fn header(bytes: &[u8]) -> Result<Vec<StoredTensor>, SafetensorsError> {
    read_header(&bytes)
}

fn refusal(bytes: impl AsRef<[u8]>, expected: &Expect) {
    expected.assert_eq(&header(bytes.as_ref()).unwrap_err().to_string());
}

fn entry(offsets: &str) -> String {
    format!(r#""a":{{"dtype":"U8","shape":[4],"data_offsets":[{offsets}]}}"#)
}

#[test]
fn tensors_are_found_where_their_bytes_are() {
    let bytes = padded(
        &[
            ("w", "F32", &[2, 2], &[1; 16]),
            ("none", "I64", &[0, 3], &[]),
            ("s", "BF16", &[], &[2; 2]),
        ],
        3,
    );
    let tensors = header(&bytes).unwrap();
    let names: Vec<&str> = tensors.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names, ["w", "none", "s"]);
    let scalar = &tensors[2];
    assert_eq!(scalar.element, Some(ElementType(16)));
    assert_eq!(scalar.dims, Vec::<i64>::new());
    let at = scalar.offset as usize;
    assert_eq!(bytes[at..at + scalar.length as usize], [2; 2]);
    assert_eq!(at + 2, bytes.len());
}

#[test]
fn what_a_header_says_can_neither_forge_a_line_nor_fill_a_log() {
    let typed = |dtype: &str| {
        let entry = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[0],"data_offsets":[0,0]}}}}"#);
        header(&with_header(entry, &[])).unwrap_err().to_string()
    };
    let forged = typed("\\n\\u001b[31mERROR");
    assert!(!forged.contains(char::is_control), "{forged:?}");
    let long = typed(&"X".repeat(100_000));
    assert!(long.len() < 500 && long.contains("at line 1"), "{long}");
}

#[test]
fn metadata_is_passed_over_and_an_empty_file_has_no_tensors() {
    assert_eq!(header(&with_header("{}", &[])).unwrap(), []);
    let bytes = with_header(r#"{"__metadata__":{"format":"pt"}}"#, &[]);
    assert_eq!(header(&bytes).unwrap(), []);
}

#[test]
fn every_type_that_onnx_has_is_known_by_its_number() {
    for (dtype, bits, name) in [
        ("BOOL", 8, Some("bool")),
        ("U8", 8, Some("uint8")),
        ("I8", 8, Some("int8")),
        ("U16", 16, Some("uint16")),
        ("I16", 16, Some("int16")),
        ("F16", 16, Some("float16")),
        ("BF16", 16, Some("bfloat16")),
        ("U32", 32, Some("uint32")),
        ("I32", 32, Some("int32")),
        ("F32", 32, Some("float")),
        ("U64", 64, Some("uint64")),
        ("I64", 64, Some("int64")),
        ("F64", 64, Some("double")),
        ("C64", 64, Some("complex64")),
        ("F8_E4M3", 8, Some("float8e4m3fn")),
        ("F8_E5M2", 8, Some("float8e5m2")),
        ("F8_E4M3FNUZ", 8, Some("float8e4m3fnuz")),
        ("F8_E5M2FNUZ", 8, Some("float8e5m2fnuz")),
        ("F8_E8M0", 8, Some("float8e8m0")),
        ("F4", 4, None),
        ("F6_E2M3", 6, None),
        ("F6_E3M2", 6, None),
    ] {
        let tensors = header(&file(&[("t", dtype, &[8], &vec![0; bits])])).unwrap();
        assert_eq!(tensors[0].element.map(ElementType::name), name, "{dtype}");
        assert_eq!(tensors[0].dtype, dtype);
    }
}

#[test]
fn a_file_that_ends_too_early_is_refused() {
    refusal(
        [1, 2, 3],
        &expect!["it has 3 bytes, the header's length alone takes 8"],
    );
    refusal(
        100u64.to_le_bytes(),
        &expect!["its header has 100 bytes, the file ends after 0 of them"],
    );
    let cut = file(&[("a", "U8", &[4], &[0; 4])]);
    refusal(
        &cut[..cut.len() - 1],
        &expect!["its tensors take 4 bytes, there are 3 bytes of data"],
    );
}

#[test]
fn a_huge_header_is_refused_before_it_is_read() {
    refusal(
        u64::MAX.to_le_bytes(),
        &expect!["its header has 18446744073709551615 bytes, at most 1048576 are allowed"],
    );
    let padding = MAX_HEADER_BYTES as usize;
    refusal(
        padded(&[], padding),
        &expect!["its header has 1048578 bytes, at most 1048576 are allowed"],
    );
    assert_eq!(header(&padded(&[], padding - 2)).unwrap(), []);
}

#[test]
fn headers_that_are_not_an_object_of_tensors_are_refused() {
    refusal(
        with_header("", &[]),
        &expect!["its header does not begin with '{'"],
    );
    refusal(
        with_header(" {}", &[]),
        &expect!["its header does not begin with '{'"],
    );
    refusal(
        with_header(b"{\"\xff\":1}", &[]),
        &expect!["its header is not valid UTF-8 at byte 2"],
    );
    refusal(
        with_header("{} x", &[]),
        &expect!["its header cannot be understood: trailing characters at line 1 column 4"],
    );
    refusal(
        with_header(
            r#"{"a":{"dtype":"F33","shape":[],"data_offsets":[0,0]}}"#,
            &[],
        ),
        &expect![[
            r#"its header cannot be understood: unknown variant `F33`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 1 column 19"#
        ]],
    );
}

#[test]
fn deeply_nested_json_is_refused() {
    let deep = format!(r#"{{"a":{}"#, "[".repeat(500_000));
    assert!(header(&with_header(deep, &[])).is_err());
    let ignored = "[".repeat(250_000) + &"]".repeat(250_000);
    let deep = format!(r#"{{"__metadata__":{ignored}}}"#);
    assert!(header(&with_header(deep, &[])).is_err());
}

#[test]
fn a_name_given_twice_is_refused() {
    let twice = format!("{{{},{}}}", entry("0,4"), entry("4,8"));
    refusal(
        with_header(twice, &[0; 8]),
        &expect!["its header cannot be understood: 'a' is given twice at line 1 column 56"],
    );
}

#[test]
fn offsets_that_do_not_fill_the_data_are_refused() {
    let check = |entries: &str, data: usize, expected: Expect| {
        refusal(
            with_header(format!("{{{entries}}}"), &vec![0; data]),
            &expected,
        );
    };
    check(
        &entry("4,0"),
        4,
        expect!["tensor 'a' ends at byte 0 of the data, before it begins at byte 4"],
    );
    check(
        &entry("4,8"),
        8,
        expect![
            "tensor 'a' begins at byte 4 of the data, the one before it ends at 0: tensors must follow each other without gaps and without overlap"
        ],
    );
    check(
        &entry("0,5"),
        5,
        expect!["tensor 'a' takes 5 bytes, its shape and type need 4"],
    );
    check(
        &entry("0,4"),
        5,
        expect!["its tensors take 4 bytes, there are 5 bytes of data"],
    );
    let b = r#""b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}"#;
    check(
        &format!("{},{b}", entry("0,4")),
        6,
        expect![
            "tensor 'b' begins at byte 2 of the data, the one before it ends at 4: tensors must follow each other without gaps and without overlap"
        ],
    );
}

#[test]
fn shapes_that_cannot_be_counted_are_refused() {
    let shaped = |shape: &str| {
        let entry = format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}}}"#);
        with_header(entry, &[])
    };
    refusal(
        shaped("4294967296,4294967296"),
        &expect!["tensor 'a' has more elements than 64 bits can count"],
    );
    refusal(
        shaped("18446744073709551615"),
        &expect!["tensor 'a' has more elements than 64 bits can count"],
    );
    refusal(
        shaped(&["1"; 65].join(",")),
        &expect!["tensor 'a' has 65 dimensions, at most 64 are allowed"],
    );
    assert!(header(&shaped("-1")).is_err());
}

proptest! {
    /// Whatever passes lies within the file, in order and without overlap.
    #[test]
    fn what_is_accepted_fills_the_file(bytes in mutated()) {
        if let Ok(tensors) = header(&bytes) {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let mut at = 8 + length;
            for tensor in tensors {
                prop_assert_eq!(tensor.offset, at);
                at += tensor.length;
            }
            prop_assert_eq!(at, bytes.len() as u64);
        }
    }

    /// This reader takes nothing that the format's own library refuses.
    #[test]
    fn what_is_accepted_the_formats_own_library_accepts(bytes in mutated()) {
        if header(&bytes).is_ok() {
            let theirs = ::safetensors::SafeTensors::deserialize(&bytes);
            prop_assert!(theirs.is_ok(), "{:?}", theirs.err());
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = header(&bytes);
    }
}

/// A valid file of a few tensors with a few bytes changed, cut or added.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let tensor = (0..3usize, 0..4i64, 0..3i64);
    let edits = vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 0..3);
    (vec(tensor, 0..4), 0..9usize, edits).prop_map(|(tensors, padding, edits)| {
        let data = [0u8; 8 * 12];
        let kinds = [("U8", 1), ("BF16", 2), ("I64", 8)];
        let shapes: Vec<[i64; 2]> = tensors.iter().map(|&(_, a, b)| [a, b]).collect();
        let names: Vec<String> = (0..tensors.len()).map(|at| format!("t{at}")).collect();
        let listed: Vec<_> = tensors
            .iter()
            .zip(&shapes)
            .zip(&names)
            .map(|((&(kind, a, b), shape), name)| {
                let (dtype, width) = kinds[kind];
                let bytes = (a * b) as usize * width;
                (name.as_str(), dtype, &shape[..], &data[..bytes])
            })
            .collect();
        let mut bytes = padded(&listed, padding);
        for (at, byte, how) in edits {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => {
                    bytes.remove(at);
                }
                // Turning one digit into another is what makes a plausible header.
                _ => {
                    let digit = bytes.iter().skip(at).position(u8::is_ascii_digit);
                    if let Some(digit) = digit {
                        bytes[at + digit] = b'0' + byte % 10;
                    }
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        bytes
    })
}
