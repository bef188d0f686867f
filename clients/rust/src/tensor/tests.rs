use super::*;

fn round_trip<T: Element + PartialEq + fmt::Debug>(values: Vec<T>) {
    let shape = [values.len() as i64];
    let copied = Tensor::from_slice(shape, &values).unwrap();
    let adopted = Tensor::from_vec(shape, values.clone()).unwrap();
    assert_eq!(copied, adopted);
    assert_eq!(copied.to_vec::<T>().unwrap(), values);
    // One byte into a larger buffer, so that wider elements are not aligned.
    let mut shifted = BytesMut::from(&[0u8][..]);
    shifted.extend_from_slice(copied.data());
    let shifted = shifted.freeze().slice(1..);
    let shifted = Tensor::raw(T::DATATYPE, shape, shifted).unwrap();
    assert_eq!(shifted.to_vec::<T>().unwrap(), values);
    assert_eq!(shifted.element_count(), values.len());
}

#[test]
fn every_element_type_survives_the_wire() {
    round_trip(vec![true, false, true]);
    round_trip(vec![0u8, 7, u8::MAX]);
    round_trip(vec![0u16, 7, u16::MAX]);
    round_trip(vec![0u32, 7, u32::MAX]);
    round_trip(vec![0u64, 7, u64::MAX]);
    round_trip(vec![i8::MIN, -1, i8::MAX]);
    round_trip(vec![i16::MIN, -1, i16::MAX]);
    round_trip(vec![i32::MIN, -1, i32::MAX]);
    round_trip(vec![i64::MIN, -1, i64::MAX]);
    round_trip(vec![-0.0f32, 1.5, f32::INFINITY]);
    round_trip(vec![-0.0f64, 1.5, f64::MIN_POSITIVE]);
    round_trip([0.5, -2.0].map(half::f16::from_f32).to_vec());
    round_trip([0.5, -2.0].map(half::bf16::from_f32).to_vec());
    round_trip::<f32>(vec![]);
}

#[test]
fn elements_are_little_endian_on_the_wire() {
    let tensor = Tensor::from_slice([1], &[0x0102_0304u32]).unwrap();
    assert_eq!(tensor.data()[..], [4, 3, 2, 1]);
}

#[test]
fn an_adopted_vector_is_neither_copied_in_nor_out() {
    let values = vec![1.0f32; 1024];
    let address = values.as_ptr();
    let tensor = Tensor::from_vec([1024], values).unwrap();
    let slice = tensor.as_slice::<f32>().unwrap();
    assert!(matches!(slice, Cow::Borrowed(_)));
    assert_eq!(slice.as_ptr(), address);
}

#[test]
fn any_byte_but_zero_is_true() {
    let tensor = Tensor::raw(DataType::Bool, [3], vec![0, 1, 255]).unwrap();
    assert_eq!(tensor.to_vec::<bool>().unwrap(), [false, true, true]);
}

#[test]
fn strings_keep_their_bytes_and_share_the_buffer() {
    let tensor = Tensor::bytes([2, 1], ["", "häuslich"]).unwrap();
    assert_eq!(tensor.strings().unwrap(), ["", "häuslich"]);
    assert_eq!(tensor.element_count(), 2);
    let elements = tensor.byte_elements().unwrap();
    assert_eq!(elements[1], "häuslich");
    let within = tensor.data().as_ptr_range();
    assert!(within.contains(&elements[1].as_ptr()));
    let binary = Tensor::bytes([2], [&b"ok"[..], &[0xff]]).unwrap();
    assert_eq!(binary.strings(), Err(TensorError::NotText { index: 1 }));
}

#[test]
fn shape_and_data_must_agree() {
    let message = |result: Result<Tensor, TensorError>| result.unwrap_err().to_string();
    assert_eq!(
        message(Tensor::from_slice([2, 2], &[1u8])),
        "shape [2, 2] has 4 elements, 1 were given"
    );
    assert_eq!(
        message(Tensor::raw(DataType::Fp32, [2], vec![0; 7])),
        "FP32 [2] takes 8 bytes, 7 were given"
    );
    for shape in [vec![-1], vec![i64::MAX, i64::MAX], vec![-1, 0]] {
        let result = Tensor::raw(DataType::Uint8, shape.clone(), Bytes::new());
        assert_eq!(result, Err(TensorError::Shape { shape }));
    }
    let overflow = Tensor::raw(DataType::Fp64, [i64::MAX], Bytes::new());
    assert!(matches!(overflow, Err(TensorError::Shape { .. })));
    assert!(Tensor::raw(DataType::Fp64, [i64::MAX, 0], Bytes::new()).is_ok());
    assert!(Tensor::from_slice(Vec::new(), &[1i64]).is_ok());
}

#[test]
fn broken_bytes_data_is_refused() {
    let raw = |shape: i64, data: &'static [u8]| Tensor::raw(DataType::Bytes, [shape], data);
    assert_eq!(raw(1, &[1, 0, 0]), Err(TensorError::Truncated { index: 0 }));
    assert_eq!(
        raw(2, &[1, 0, 0, 0, 9, 255, 255, 255, 255, 0]),
        Err(TensorError::Truncated { index: 1 })
    );
    assert!(matches!(
        raw(2, &[1, 0, 0, 0, 9]),
        Err(TensorError::ElementCount {
            expected: 2,
            actual: 1,
            ..
        })
    ));
}

#[test]
fn asking_for_another_type_is_an_error() {
    let tensor = Tensor::from_slice([1], &[1i32]).unwrap();
    let error = tensor.as_slice::<f32>().unwrap_err();
    assert_eq!(error.to_string(), "holds INT32, not FP32");
    assert!(tensor.strings().is_err());
}

#[test]
fn typed_contents_are_narrowed_with_a_check() {
    let contents = pb::InferTensorContents {
        int_contents: vec![-128, 127],
        uint_contents: vec![300],
        ..Default::default()
    };
    let tensor = Tensor::from_contents(DataType::Int8, vec![2], contents.clone()).unwrap();
    assert_eq!(tensor.to_vec::<i8>().unwrap(), [-128, 127]);
    let error = Tensor::from_contents(DataType::Uint8, vec![1], contents.clone()).unwrap_err();
    assert_eq!(error.to_string(), "element 0 (300) does not fit UINT8");
    assert!(Tensor::from_contents(DataType::Fp16, vec![0], contents).is_err());
}
