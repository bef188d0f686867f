use super::*;

fn input(datatype: DataType, shape: &[i64]) -> TensorMetadata {
    TensorMetadata::new("x", datatype, shape)
}

fn made(text: &str, datatype: DataType, signature: &[i64]) -> Result<Tensor, String> {
    shaped(text, datatype, signature, None)
}

fn shaped(
    text: &str,
    datatype: DataType,
    signature: &[i64],
    shape: Option<&[i64]>,
) -> Result<Tensor, String> {
    let input = input(datatype, signature);
    let tensor = Source::parse(text).tensor(&input, shape, &mut Random(0));
    tensor.map_err(|error| error.to_string())
}

#[test]
fn nested_lists_give_the_shape() {
    let tensor = made("[[1, 2, 3], [4, 5, 6]]", DataType::Fp32, &[-1, 3]).unwrap();
    assert_eq!(tensor.shape(), [2, 3]);
    assert_eq!(
        tensor.to_vec::<f32>().unwrap(),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    );
    let row = made("[1, 2, 3]", DataType::Int64, &[-1, 3]).unwrap();
    assert_eq!(row.shape(), [1, 3]);
    let flat = made("[1, 2, 3, 4]", DataType::Int64, &[-1, 2, 1]).unwrap();
    assert_eq!(flat.shape(), [2, 2, 1]);
    let given = shaped("[1, 2, 3, 4]", DataType::Int64, &[-1, -1], Some(&[2, 2])).unwrap();
    assert_eq!(given.shape(), [2, 2]);
    let scalar = made("7", DataType::Int8, &[1]).unwrap();
    assert_eq!(scalar.shape(), [1]);
    let words = made(r#"["a", "b"]"#, DataType::Bytes, &[-1]).unwrap();
    assert_eq!(words.strings().unwrap(), ["a", "b"]);
    let empty = made("[]", DataType::Fp32, &[-1]).unwrap();
    assert_eq!(empty.shape(), [0]);
}

#[test]
fn values_that_do_not_fit_are_named() {
    let error = |text, datatype| made(text, datatype, &[-1]).unwrap_err();
    let prefix = "input \"x\": ";
    assert_eq!(
        error("[300]", DataType::Uint8),
        format!("{prefix}300 is not a value of UINT8")
    );
    assert_eq!(
        error("[1.5]", DataType::Int32),
        format!("{prefix}1.5 is not a value of INT32")
    );
    assert_eq!(
        error("[\"a\"]", DataType::Fp32),
        format!("{prefix}\"a\" is not a value of FP32")
    );
    assert_eq!(
        error("[2]", DataType::Bool),
        format!("{prefix}2 is not a value of BOOL")
    );
    let ragged = made("[[1, 2], [3]]", DataType::Fp32, &[-1, 2]).unwrap_err();
    assert!(
        ragged.ends_with("ragged JSON: a list of 1 where others have 2"),
        "{ragged}"
    );
    let mixed = made("[[1, 2], 3]", DataType::Fp32, &[-1, 2]).unwrap_err();
    assert!(mixed.contains("ragged"), "{mixed}");
    let deeper = made("[1, [2]]", DataType::Fp32, &[-1]).unwrap_err();
    assert!(deeper.contains("ragged"), "{deeper}");
    let typo = error("zeroes", DataType::Fp32);
    assert!(
        typo.contains("neither `zeros`, `random`, @FILE nor JSON"),
        "{typo}"
    );
    assert!(error("@/no/such/file", DataType::Fp32).contains("cannot read /no/such/file"));
}

#[test]
fn extreme_integers_keep_every_bit() {
    let large = made("[18446744073709551615]", DataType::Uint64, &[-1]).unwrap();
    assert_eq!(large.to_vec::<u64>().unwrap(), [u64::MAX]);
    let small = made("[-9223372036854775808]", DataType::Int64, &[-1]).unwrap();
    assert_eq!(small.to_vec::<i64>().unwrap(), [i64::MIN]);
}

#[test]
fn every_type_can_be_filled() {
    for datatype in DataType::ALL {
        for text in ["zeros", "random"] {
            let tensor = made(text, datatype, &[-1, 3]).unwrap();
            assert_eq!(tensor.shape(), [1, 3], "{datatype}");
            assert_eq!(to_json(&tensor, 2).unwrap().len(), 2);
        }
    }
    let numbers = shaped("random", DataType::Fp32, &[-1], Some(&[1000])).unwrap();
    let numbers = numbers.to_vec::<f32>().unwrap();
    assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
    assert!(numbers.iter().any(|number| *number > 0.9));
    let endless = shaped("zeros", DataType::Fp32, &[-1], Some(&[i64::MAX]));
    assert!(endless.unwrap_err().contains("2147483647 bytes"));
}

#[test]
fn files_are_json_or_raw_elements() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        format!("@{}", path.display())
    };
    let json = file("x.json", b"[[1], [2]]");
    assert_eq!(
        made(&json, DataType::Uint8, &[-1, 1]).unwrap().shape(),
        [2, 1]
    );
    let raw = file("x.bin", &[1, 0, 2, 0, 3, 0, 4, 0]);
    let tensor = made(&raw, DataType::Int16, &[-1, 2]).unwrap();
    assert_eq!(tensor.shape(), [2, 2]);
    assert_eq!(tensor.to_vec::<i16>().unwrap(), [1, 2, 3, 4]);
    let uneven = made(&raw, DataType::Int16, &[-1, 3]).unwrap_err();
    assert!(uneven.contains("4 elements do not fill [-1,3]"), "{uneven}");
    let open = made(&raw, DataType::Int16, &[-1, -1]).unwrap_err();
    assert!(
        open.contains("leaves several dimensions open; give --shape"),
        "{open}"
    );
    let blob = made(&raw, DataType::Bytes, &[-1, 1]).unwrap();
    assert_eq!(blob.shape(), [1, 1]);
    assert_eq!(blob.byte_elements().unwrap()[0].len(), 8);
}

#[test]
fn floats_are_shown_as_short_as_they_are() {
    let tensor = Tensor::from_slice([4], &[0.1f32, f32::NAN, f32::NEG_INFINITY, 2.5]).unwrap();
    let shown = serde_json::to_string(&to_json(&tensor, 9).unwrap()).unwrap();
    assert_eq!(shown, r#"[0.1,"NaN","-inf",2.5]"#);
}
