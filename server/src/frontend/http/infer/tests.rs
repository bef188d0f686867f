use std::fmt::Write;

use dormouse_core::code::ErrorCode;
use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;
use crate::signature::{model, tensor};

const RECEIVED: Timestamp = Timestamp::from_nanos(5_000);

fn parse(
    body: &Bytes,
    header_length: Option<usize>,
    received: Timestamp,
) -> Result<Parsed, ServeError> {
    super::parse(body, header_length, received, &RequestLimits::default())
}

fn parse_json(json: &str) -> Result<Parsed, ServeError> {
    parse(&Bytes::copy_from_slice(json.as_bytes()), None, RECEIVED)
}

fn show(parsed: Result<Parsed, ServeError>) -> String {
    let Parsed { request, plan } = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return format!("{:?}: {error}", error.code()),
    };
    let mut text = format!("id={:?} priority={}", request.id, request.priority);
    if let Some(deadline) = request.deadline {
        write!(text, " timeout={:?}", deadline - request.received).unwrap();
    }
    for input in &request.inputs {
        let shape = DisplayShape(&input.shape);
        write!(
            text,
            "\n{} {}{shape} {:?}",
            input.name,
            input.datatype,
            &input.data[..]
        )
        .unwrap();
    }
    for output in &request.outputs {
        write!(text, "\n-> {output} binary={}", plan.is_binary(output)).unwrap();
    }
    write!(text, "\n-> otherwise binary={}", plan.binary).unwrap();
    text
}

fn check(json: &str, expected: Expect) {
    expected.assert_eq(&show(parse_json(json)));
}

fn check_binary(json: &str, tail: &[u8], expected: Expect) {
    let body = Bytes::from([json.as_bytes(), tail].concat());
    expected.assert_eq(&show(parse(&body, Some(json.len()), RECEIVED)));
}

#[test]
fn a_json_request_is_read() {
    check(
        r#"{"id":"7","inputs":[{"name":"a","shape":[1,2],"datatype":"INT16","data":[[1,-1]]},
            {"name":"b","shape":[1],"datatype":"BYTES","parameters":{"content_type":"str"},"data":["hi"]}],
            "outputs":[{"name":"x"},{"name":"y","parameters":{"binary_data":true,"classification":0}}],
            "parameters":{"priority":2,"timeout":1500,"custom":{"deep":[1]},"sequence_id":0,"sequence_start":false}}"#,
        expect![[r#"
            id="7" priority=2 timeout=1.5ms
            a INT16[1,2] [1, 0, 255, 255]
            b BYTES[1] [2, 0, 0, 0, 104, 105]
            -> x binary=false
            -> y binary=true
            -> otherwise binary=false"#]],
    );
}

#[test]
fn the_order_of_keys_does_not_matter() {
    check(
        r#"{"parameters":{"binary_data_output":true},"outputs":null,"id":null,
            "inputs":[{"data":[1.5],"datatype":"FP32","name":"a","parameters":null,"shape":[1],"more":{}}]}"#,
        expect![[r#"
            id="" priority=0
            a FP32[1] [0, 0, 192, 63]
            -> otherwise binary=true"#]],
    );
}

#[test]
fn binary_inputs_are_slices_of_the_tail_in_order() {
    check_binary(
        r#"{"inputs":[{"name":"a","shape":[2],"datatype":"UINT8","parameters":{"binary_data_size":2}},
            {"name":"j","shape":[1],"datatype":"UINT8","data":[9]},
            {"name":"e","shape":[0],"datatype":"UINT8","parameters":{"binary_data_size":0}},
            {"name":"b","shape":[3],"datatype":"UINT8","parameters":{"binary_data_size":3}}]}"#,
        &[1, 2, 3, 4, 5],
        expect![[r#"
            id="" priority=0
            a UINT8[2] [1, 2]
            j UINT8[1] [9]
            e UINT8[0] []
            b UINT8[3] [3, 4, 5]
            -> otherwise binary=false"#]],
    );
    let json = r#"{"inputs":[{"name":"a","shape":[4],"datatype":"UINT8","parameters":{"binary_data_size":4}}]}"#;
    let body = Bytes::from([json.as_bytes(), &[1, 2, 3, 4]].concat());
    let parsed = parse(&body, Some(json.len()), RECEIVED).unwrap();
    let data = &parsed.request.inputs[0].data;
    assert_eq!(data.as_ptr(), body[json.len()..].as_ptr(), "not a copy");
}

#[test]
fn binary_sizes_must_fit_the_tail_exactly() {
    let json = r#"{"inputs":[{"name":"a","shape":[2],"datatype":"UINT8","parameters":{"binary_data_size":2}}]}"#;
    check_binary(
        json,
        &[1],
        expect![
            "InvalidRequest: unexpected size for input 'a': 'binary_data_size' is 2, and 1 bytes are left in the body"
        ],
    );
    check_binary(
        json,
        &[1, 2, 3],
        expect![
            "InvalidRequest: unexpected additional input data: 1 bytes follow the last binary input"
        ],
    );
    check_binary(
        r#"{"inputs":[{"name":"a","shape":[2],"datatype":"UINT8","parameters":{"binary_data_size":18446744073709551615}}]}"#,
        &[1, 2],
        expect![
            "InvalidRequest: unexpected size for input 'a': 'binary_data_size' is 18446744073709551615, and 2 bytes are left in the body"
        ],
    );
    let error = parse(&Bytes::from_static(b"{}"), Some(3), RECEIVED).unwrap_err();
    assert!(error.message().contains("only 2 bytes"), "{error}");
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let input = |members: &str| format!(r#"{{"inputs":[{{{members}}}]}}"#);
    for (json, expected) in [
        (String::new(), "the request body is empty"),
        (
            "[]".into(),
            "expected an object for the request at byte 0, found '['",
        ),
        ("{}".into(), "the request has no 'inputs'"),
        ("{\"inputs\":{}}".into(), "expected an array for 'inputs'"),
        ("{\"inputs\":[]} {}".into(), "expected the end of the text"),
        (
            "{\"inputs\":[],\"inputs\":[]}".into(),
            "'inputs' is given twice in the request",
        ),
        ("{\"inputs\":[],\"id\":7}".into(), "a string for 'id'"),
        (
            "{\"inputs\":[],\"parameters\":{\"timeout\":-1}}".into(),
            "'timeout' (microseconds) is -1: out of range",
        ),
        (
            "{\"inputs\":[],\"parameters\":{\"priority\":1.5}}".into(),
            "'priority' is 1.5: expected a whole number",
        ),
        (
            "{\"inputs\":[],\"parameters\":{\"triton_x\":1}}".into(),
            "reserved",
        ),
        (input(""), "inputs[0] has no 'name'"),
        (input(r#""name":"a""#), "inputs[0] has no 'datatype'"),
        (
            input(r#""name":"a","datatype":"FP31""#),
            "unknown datatype 'FP31'",
        ),
        (
            input(r#""name":"a","datatype":"FP32""#),
            "inputs[0] has no 'shape'",
        ),
        (
            input(r#""name":"a","datatype":"FP32","shape":[-1]"#),
            "negative dimension -1",
        ),
        (
            input(r#""name":"a","datatype":"FP32","shape":[1.0]"#),
            "expected a whole number",
        ),
        (
            input(r#""name":"a","datatype":"FP32","shape":[99999999999999999999]"#),
            "out of range",
        ),
        (
            input(r#""name":"a","datatype":"FP32","shape":[1]"#),
            "input 'a' must set either 'data' or 'binary_data_size' in 'parameters': none is set",
        ),
        (
            input(
                r#""name":"a","datatype":"FP32","shape":[1],"data":[1],"parameters":{"binary_data_size":4}"#,
            ),
            "both are set",
        ),
        (
            input(r#""name":"a","datatype":"FP32","shape":[1],"data":[1],"data":[1]"#),
            "'data' is given twice in inputs[0]",
        ),
        (
            input(r#""data":[[1],[]],"name":"a","datatype":"FP32","shape":[1]"#),
            "input 'a': the arrays in 'data' are ragged",
        ),
    ] {
        let error = parse_json(&json).expect_err(&json);
        assert_eq!(error.code(), ErrorCode::InvalidRequest, "{json}");
        assert!(error.message().contains(expected), "{json}: {error}");
    }
}

#[test]
fn a_sequence_is_named_by_a_number_or_a_string() {
    let step = |id: &str| {
        let json = format!(
            r#"{{"inputs":[],"parameters":{{"sequence_id":{id},"sequence_start":true,"sequence_end":false}}}}"#
        );
        let parsed = parse_json(&json)?;
        let sequence = parsed.request.sequence;
        Ok::<_, ServeError>(sequence.map(|sequence| {
            assert!(sequence.step.start && !sequence.step.end);
            sequence.step.id
        }))
    };
    let number = SequenceId::Number(u64::MAX);
    assert_eq!(step("18446744073709551615").unwrap(), Some(number));
    assert_eq!(step(r#""s""#).unwrap(), Some(SequenceId::Text("s".into())));
    assert_eq!(step("0").unwrap(), None);
    assert_eq!(step(r#""""#).unwrap(), None);
    for wrong in ["-1", "1.5", "true", "18446744073709551616"] {
        assert!(step(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn shared_memory_and_classification_are_read_from_the_tensors_parameters() {
    let json = r#"{"inputs":[{"name":"a","datatype":"FP32","shape":[2],"parameters":
        {"shared_memory_region":"r","shared_memory_byte_size":8,"shared_memory_offset":4}}],
        "outputs":[{"name":"x","parameters":{"classification":3}},{"name":"y","parameters":
        {"shared_memory_region":"s","shared_memory_byte_size":16}}]}"#;
    let wishes = *parse_json(json).unwrap().request.wishes.unwrap();
    let slice = |region: &str, offset, byte_size| RegionSlice {
        region: region.to_owned(),
        offset,
        byte_size,
    };
    assert_eq!(wishes.inputs, [(0, slice("r", 4, 8))]);
    assert_eq!(
        wishes.outputs,
        [
            ("x".to_owned(), OutputWish::Classes(3)),
            ("y".to_owned(), OutputWish::Region(slice("s", 0, 16))),
        ]
    );
    for json in [
        r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"shared_memory_region":"r"}}]}"#,
        r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"shared_memory_offset":1}}]}"#,
        r#"{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":-1}}]}"#,
        r#"{"inputs":[],"outputs":[{"name":"y","parameters":
            {"classification":1,"shared_memory_region":"r","shared_memory_byte_size":1}}]}"#,
        r#"{"inputs":[{"name":"a","datatype":"FP32","shape":[1],"data":[1],"parameters":
            {"shared_memory_region":"r","shared_memory_byte_size":4}}]}"#,
        r#"{"inputs":[{"name":"a","datatype":"FP32","shape":[1],"parameters":
            {"shared_memory_region":"r","shared_memory_byte_size":-4}}]}"#,
    ] {
        let error = parse_json(json).expect_err(json);
        assert_eq!(error.code(), ErrorCode::InvalidRequest, "{json}: {error}");
    }
}

#[test]
fn single_requests_that_kill_other_servers_are_refused() {
    let deep = format!("{{\"inputs\":[{{\"data\":{}", "[".repeat(100_000));
    assert!(parse_json(&deep).is_err());
    let deep = format!("{{\"parameters\":{{\"x\":{}", "{\"a\":".repeat(100_000));
    assert!(parse_json(&deep).is_err());
    let deep = "[".repeat(250_000);
    assert!(parse_json(&deep).is_err());
    let huge =
        r#"{"inputs":[{"name":"a","datatype":"FP32","shape":[1,1099511627776],"data":[1]}]}"#;
    assert!(parse_json(huge).is_err());
    let many = format!(
        "{{\"inputs\":[{}]}}",
        vec![r#"{"name":"a","datatype":"UINT8","shape":[1],"data":[1]}"#; 4097].join(",")
    );
    assert!(parse_json(&many).unwrap_err().message().contains("4096"));
    let many = format!(
        "{{\"inputs\":[],\"outputs\":[{}]}}",
        vec![r#"{"name":"a"}"#; 4097].join(",")
    );
    assert!(parse_json(&many).unwrap_err().message().contains("4096"));
    let dims = vec!["1"; 33].join(",");
    let many = format!(r#"{{"inputs":[{{"name":"a","shape":[{dims}]}}]}}"#);
    assert!(
        parse_json(&many)
            .unwrap_err()
            .message()
            .contains("32 dimensions")
    );
}

#[test]
fn the_length_header_is_digits_only() {
    assert_eq!(header_length(b"0").unwrap(), 0);
    assert_eq!(header_length(b"123").unwrap(), 123);
    for value in [
        &b""[..],
        b"-1",
        b"+1",
        b"1x",
        b"99999999999999999999999",
        b"\xff",
    ] {
        assert!(header_length(value).is_err());
    }
}

fn spec(inputs: &[(DataType, &[i64])], max_batch_size: u32) -> ModelSpec {
    let inputs = inputs
        .iter()
        .enumerate()
        .map(|(index, (datatype, dims))| tensor(&format!("in{index}"), *datatype, dims));
    model("m", max_batch_size, inputs.collect(), Vec::new())
}

#[test]
fn raw_bodies_get_their_shape_from_the_model() {
    let shape = |datatype, dims: &[i64], batch, length: usize| {
        let body = Bytes::from(vec![1u8; length]);
        parse_raw(body, &spec(&[(datatype, dims)], batch), RECEIVED).map(|parsed| {
            assert!(parsed.plan.is_binary("anything"));
            let input = &parsed.request.inputs[0];
            (input.shape.to_vec(), input.data.len())
        })
    };
    let fp32 = DataType::Fp32;
    assert_eq!(shape(fp32, &[-1], 0, 40).unwrap(), (vec![10], 40));
    assert_eq!(shape(fp32, &[2, -1], 8, 40).unwrap(), (vec![1, 2, 5], 40));
    assert_eq!(shape(fp32, &[3, 2], 8, 24).unwrap(), (vec![1, 3, 2], 24));
    assert_eq!(shape(fp32, &[-1], 0, 0).unwrap(), (vec![0], 0));
    assert_eq!(shape(DataType::Bytes, &[1], 4, 5).unwrap(), (vec![1, 1], 9));
    assert!(shape(fp32, &[2, -1], 0, 41).is_err());
    assert!(shape(fp32, &[-1, -1], 0, 40).is_err());
    assert!(shape(fp32, &[0, -1], 0, 40).is_err());
    assert!(shape(DataType::Bytes, &[-1], 0, 5).is_err());
    let two = spec(&[(fp32, &[1]), (fp32, &[1])], 0);
    assert!(parse_raw(Bytes::new(), &two, RECEIVED).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic_the_parser(
        body in proptest::collection::vec(any::<u8>(), 0..300),
        header_length in proptest::option::of(0usize..300),
    ) {
        let _ = parse(&body.into(), header_length, RECEIVED);
    }

    #[test]
    fn no_damage_to_a_good_request_panics_the_parser(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let json = r#"{"id":"7","inputs":[{"name":"a","shape":[1,2],"datatype":"FP32","data":[[1,-1e5]]},{"name":"b","shape":[1],"datatype":"BYTES","data":["h\u00e9"]},{"name":"c","shape":[4],"datatype":"UINT8","parameters":{"binary_data_size":4}}],"outputs":[{"name":"x","parameters":{"binary_data":true}}],"parameters":{"timeout":1500}}"#;
        let mut body = [json.as_bytes(), &[1, 2, 3, 4]].concat();
        for (at, byte) in edits {
            let at = at.index(body.len());
            body[at] = byte;
        }
        body.truncate(cut.index(body.len() + 1));
        let _ = parse(&body.into(), Some(json.len()), RECEIVED);
    }
}
