use bytes::Bytes;
use dormouse_core::shape::Shape;
use proptest::prelude::*;

use super::*;

fn try_read(datatype: DataType, shape: &[i64], data: &str) -> Result<Vec<u8>, String> {
    let declared = Declared {
        name: "x",
        datatype,
        shape,
    };
    let mut reader = Reader::new(data.as_bytes()).map_err(|error| error.to_string())?;
    let raw = read(&mut reader, declared).map_err(|error| error.to_string())?;
    reader.finish().map_err(|error| error.to_string())?;
    Ok(raw)
}

fn written(datatype: DataType, shape: &[i64], data: &[u8]) -> String {
    let tensor = Tensor {
        datatype,
        shape: Shape::from_slice(shape),
        data: Bytes::copy_from_slice(data),
    };
    let mut text = Vec::new();
    write(&mut text, "y", &tensor).unwrap();
    String::from_utf8(text).unwrap()
}

/// Reads `data` and writes it again.
fn again(datatype: DataType, count: i64, data: &str) -> String {
    written(
        datatype,
        &[count],
        &try_read(datatype, &[count], data).unwrap(),
    )
}

#[test]
fn every_type_survives_the_way_there_and_back() {
    for (datatype, count, data) in [
        (DataType::Bool, 2, "[true,false]"),
        (DataType::Uint8, 2, "[0,255]"),
        (DataType::Uint16, 2, "[0,65535]"),
        (DataType::Uint32, 2, "[0,4294967295]"),
        (DataType::Uint64, 2, "[0,18446744073709551615]"),
        (DataType::Int8, 2, "[-128,127]"),
        (DataType::Int16, 2, "[-32768,32767]"),
        (DataType::Int32, 2, "[-2147483648,2147483647]"),
        (
            DataType::Int64,
            3,
            "[-9223372036854775808,9223372036854775807,9007199254740993]",
        ),
        (DataType::Fp16, 4, "[0.5,-65504.0,NaN,Infinity]"),
        (DataType::Bf16, 3, "[1.5,-2.0,-Infinity]"),
        (
            DataType::Fp32,
            5,
            "[0.1,-3.4028235e+38,NaN,Infinity,-Infinity]",
        ),
        (DataType::Fp64, 3, "[0.1,1.7976931348623157e+308,NaN]"),
        (DataType::Bytes, 3, r#"["","a\"\n","é😀"]"#),
    ] {
        assert_eq!(again(datatype, count, data), data, "{datatype}");
    }
}

#[test]
fn other_spellings_are_read() {
    assert_eq!(again(DataType::Bool, 2, "[1, 0]"), "[true,false]");
    assert_eq!(
        again(DataType::Fp32, 3, r#"["NaN","Infinity","-Infinity"]"#),
        "[NaN,Infinity,-Infinity]"
    );
    assert_eq!(again(DataType::Fp32, 3, "[1,-2,1e2]"), "[1.0,-2.0,100.0]");
    assert_eq!(again(DataType::Uint8, 1, "[-0]"), "[0]");
    assert_eq!(again(DataType::Bytes, 1, r#"["\u00e9"]"#), "[\"é\"]");
}

#[test]
fn bytes_are_length_prefixed() {
    assert_eq!(
        try_read(DataType::Bytes, &[2], r#"["ab",""]"#).unwrap(),
        [2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0]
    );
}

#[test]
fn nesting_and_flat_are_the_same_tensor() {
    for (shape, data) in [
        (&[2i64, 3][..], "[1,2,3,4,5,6]"),
        (&[2, 3], "[[1,2,3],[4,5,6]]"),
        (&[2, 3], " [ [ 1 , 2 , 3 ] , [ 4 , 5 , 6 ] ] "),
        (&[2, 3, 1], "[[[1],[2],[3]],[[4],[5],[6]]]"),
        (&[6], "[[1,2,3],[4,5,6]]"),
    ] {
        let raw = try_read(DataType::Uint8, shape, data).unwrap();
        assert_eq!(raw, [1, 2, 3, 4, 5, 6], "{data}");
    }
    for (shape, data) in [
        (&[0i64][..], "[]"),
        (&[2, 0], "[[],[]]"),
        (&[0, i64::MAX], "[]"),
    ] {
        assert!(try_read(DataType::Uint8, shape, data).unwrap().is_empty());
    }
    assert_eq!(try_read(DataType::Uint8, &[], "[7]").unwrap(), [7]);
}

#[test]
fn errors_name_the_tensor_and_the_fault() {
    for (datatype, shape, data, expected) in [
        (
            DataType::Uint8,
            &[2i64][..],
            "[1,256]",
            "input 'x', element 1: 256 is out of range for UINT8 (0 to 255)",
        ),
        (
            DataType::Uint64,
            &[1],
            "[-1]",
            "input 'x', element 0: -1 is out of range for UINT64",
        ),
        (
            DataType::Int64,
            &[1],
            "[9223372036854775808]",
            "out of range for INT64",
        ),
        (
            DataType::Int32,
            &[1],
            "[1.5]",
            "1.5 is not a whole number, as INT32 needs",
        ),
        (DataType::Int32, &[1], "[true]", "expected a whole number"),
        (DataType::Int32, &[1], "[null]", "expected a whole number"),
        (DataType::Bool, &[1], "[2]", "true, false, 0 or 1"),
        (
            DataType::Bool,
            &[1],
            "[1.0]",
            "1.0 is not true, false, 0 or 1",
        ),
        (
            DataType::Fp32,
            &[1],
            "[1e39]",
            "1e39 is out of range for FP32",
        ),
        (
            DataType::Fp16,
            &[1],
            "[65520]",
            "65520 is out of range for FP16",
        ),
        (
            DataType::Fp64,
            &[1],
            "[1e999]",
            "1e999 is out of range for FP64",
        ),
        (DataType::Fp32, &[1], "[\"nan\"]", "expected a number"),
        (DataType::Bytes, &[1], "[1]", "expected a string"),
        (
            DataType::Uint8,
            &[2],
            "[1]",
            "shape [2] has 2 elements, 'data' has 1",
        ),
        (
            DataType::Uint8,
            &[2],
            "[1,2,3]",
            "shape [2] has 2 elements, 'data' has more",
        ),
        (
            DataType::Fp32,
            &[1, 1 << 40],
            "[1]",
            "shape [1,1099511627776] has 1099511627776 elements, 'data' has 1",
        ),
        (
            DataType::Fp32,
            &[i64::MAX, i64::MAX],
            "[1]",
            "more elements than can be counted",
        ),
        (DataType::Uint8, &[3], "[[1,2],[3]]", "ragged"),
        (DataType::Uint8, &[3], "[[1,2],3]", "ragged"),
        (DataType::Uint8, &[3], "[1,[2,3]]", "ragged"),
        (DataType::Uint8, &[1], "[[],1]", "ragged"),
        (DataType::Uint8, &[1], "[[],[1]]", "ragged"),
        (DataType::Uint8, &[2], "[[[1]],[2]]", "ragged"),
        (
            DataType::Uint8,
            &[1],
            "1",
            "an array for 'data' of input 'x'",
        ),
        (DataType::Uint8, &[1], "[1,]", "expected an element"),
        (DataType::Uint8, &[1], "[[1],]", "expected an array"),
        (DataType::Uint8, &[1], "[,1]", "expected a whole number"),
        (DataType::Uint8, &[1], "[1", "',' or ']'"),
        (DataType::Uint8, &[1], "[1}", "',' or ']'"),
        (DataType::Uint8, &[1], "[01]", "expected"),
    ] {
        let error = try_read(datatype, shape, data).expect_err(data);
        assert!(error.contains(expected), "{data}: {error}");
    }
}

#[test]
fn nested_arrays_are_bounded() {
    let deep = "[".repeat(100_000);
    let error = try_read(DataType::Fp32, &[1], &deep).unwrap_err();
    assert!(error.contains("deeper than 100"), "{error}");
}

#[test]
fn bytes_that_are_no_text_ask_for_binary() {
    let tensor = Tensor {
        datatype: DataType::Bytes,
        shape: Shape::from_slice(&[1]),
        data: Bytes::from_static(&[1, 0, 0, 0, 0xff]),
    };
    let error = write(&mut Vec::new(), "y", &tensor).unwrap_err();
    assert!(error.message().contains("binary_data"), "{error}");
}

#[test]
fn outputs_that_do_not_fit_their_shape_are_an_error() {
    for (datatype, shape, data) in [
        (DataType::Fp32, &[2i64][..], &[0u8; 4][..]),
        (DataType::Fp32, &[1], &[0; 5]),
        (DataType::Bytes, &[1], &[9, 0, 0, 0, b'a']),
        (DataType::Bytes, &[1], &[0, 0]),
        (DataType::Bytes, &[2], &[0, 0, 0, 0]),
    ] {
        let tensor = Tensor {
            datatype,
            shape: Shape::from_slice(shape),
            data: Bytes::copy_from_slice(data),
        };
        assert!(write(&mut Vec::new(), "y", &tensor).is_err());
    }
}

proptest! {
    #[test]
    fn floats_come_back_bit_for_bit(values in proptest::collection::vec(any::<f32>(), 0..50)) {
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let count = values.len() as i64;
        let text = written(DataType::Fp32, &[count], &raw);
        let read_back = try_read(DataType::Fp32, &[count], &text).unwrap();
        for (value, bytes) in values.iter().zip(read_back.as_chunks::<4>().0) {
            let found = f32::from_le_bytes(*bytes);
            prop_assert!(found.to_bits() == value.to_bits() || (found.is_nan() && value.is_nan()));
        }
    }

    #[test]
    fn half_floats_come_back_bit_for_bit(bits in proptest::collection::vec(any::<u16>(), 0..50)) {
        let raw: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let count = bits.len() as i64;
        for datatype in [DataType::Fp16, DataType::Bf16] {
            let text = written(datatype, &[count], &raw);
            let read_back = try_read(datatype, &[count], &text).unwrap();
            prop_assert_eq!(written(datatype, &[count], &read_back), text);
        }
    }

    #[test]
    fn nothing_panics_and_what_is_read_has_its_size(
        data in "[\\[\\],0-9. -]{0,30}",
        shape in proptest::collection::vec(0i64..4, 0..3),
    ) {
        if let Ok(raw) = try_read(DataType::Int32, &shape, &data) {
            prop_assert_eq!(Some(raw.len() as u64 / 4), element_count(&shape));
        }
    }
}
