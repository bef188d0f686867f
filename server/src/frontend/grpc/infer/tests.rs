use dormouse_core::sequence::Step;
use dormouse_core::time::Timestamp;
use pb::model_infer_request::InferRequestedOutputTensor;

use super::*;
use crate::request::OutputWish;
use crate::shared_memory::RegionSlice;

const TIME: CallTime = CallTime {
    received: Timestamp::from_nanos(1_000_000),
    deadline: None,
};

fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

fn parameter(choice: ParameterChoice) -> pb::InferParameter {
    pb::InferParameter {
        parameter_choice: Some(choice),
    }
}

fn parameters<const N: usize>(
    entries: [(&str, ParameterChoice); N],
) -> HashMap<String, pb::InferParameter> {
    entries
        .into_iter()
        .map(|(name, choice)| (name.to_owned(), parameter(choice)))
        .collect()
}

fn read(request: pb::ModelInferRequest) -> Result<RawRequest, ServeError> {
    read_request("m", TIME, request, &RequestLimits::default())
}

#[track_caller]
fn refused(request: pb::ModelInferRequest, code: ErrorCode, expected: &str) {
    let error = read(request).unwrap_err();
    assert_eq!(error.message(), expected);
    assert_eq!(error.code(), code);
}

#[test]
fn raw_contents_belong_to_inputs_in_order() {
    let data = Bytes::from_static(&[1, 2, 3]);
    let raw = read(pb::ModelInferRequest {
        id: "7".into(),
        inputs: vec![input("a", "UINT8", &[2]), input("b", "UINT8", &[1])],
        outputs: vec![InferRequestedOutputTensor {
            name: "y".into(),
            ..Default::default()
        }],
        raw_input_contents: vec![data.slice(..2), data.slice(2..)],
        ..Default::default()
    })
    .unwrap();
    assert_eq!(raw.id, "7");
    assert_eq!(raw.outputs, ["y"]);
    assert_eq!(raw.received, TIME.received);
    assert_eq!(
        (raw.inputs[0].name.as_str(), &raw.inputs[0].data[..]),
        ("a", &[1, 2][..])
    );
    assert_eq!(raw.inputs[0].data.as_ptr(), data.as_ptr());
    assert_eq!(
        (raw.inputs[1].name.as_str(), &raw.inputs[1].data[..]),
        ("b", &[3][..])
    );
}

#[test]
fn raw_contents_are_for_all_inputs_or_none() {
    let typed = InferInputTensor {
        contents: Some(pb::InferTensorContents {
            int_contents: vec![1],
            ..Default::default()
        }),
        ..input("a", "INT32", &[1])
    };
    refused(
        pb::ModelInferRequest {
            inputs: vec![typed.clone(), input("b", "INT32", &[1])],
            raw_input_contents: vec![Bytes::new()],
            ..Default::default()
        },
        ErrorCode::InvalidRequest,
        "unexpected number of raw_input_contents for model 'm': expected 2, one for each of \
         inputs, got 1",
    );
    refused(
        pb::ModelInferRequest {
            inputs: vec![typed.clone()],
            raw_input_contents: vec![Bytes::new()],
            ..Default::default()
        },
        ErrorCode::InvalidRequest,
        "input 'a' of model 'm' has contents although raw_input_contents is used: expected all \
         inputs in one or all in the other",
    );
    refused(
        pb::ModelInferRequest {
            inputs: vec![typed.clone(), input("b", "INT32", &[1])],
            ..Default::default()
        },
        ErrorCode::InvalidRequest,
        "input 'b' of model 'm' has no data: expected it in raw_input_contents or in contents",
    );
    let empty = input("b", "INT32", &[0]);
    let raw = read(pb::ModelInferRequest {
        inputs: vec![typed, empty],
        ..Default::default()
    });
    assert_eq!(raw.unwrap().inputs[0].data[..], [1, 0, 0, 0]);
}

#[test]
fn unknown_datatypes_and_endless_shapes_are_refused() {
    let with = |input| pb::ModelInferRequest {
        inputs: vec![input],
        raw_input_contents: vec![Bytes::new()],
        ..Default::default()
    };
    let error = read(with(input("a", "FLOAT", &[1]))).unwrap_err();
    assert!(
        error.message().starts_with(
            "unknown datatype 'FLOAT' of input 'a' of model 'm': expected one of BOOL, "
        )
    );
    refused(
        with(input("a", "INT8", &[1; 65])),
        ErrorCode::InvalidRequest,
        "input 'a' of model 'm': its shape has more than 32 dimensions (limits.max_dimensions)",
    );
}

#[test]
fn priority_and_timeout_are_numbers_in_any_dress() {
    use ParameterChoice::*;
    for value in [Int64Param(3), Uint64Param(3), StringParam("3".into())] {
        let raw = read(pb::ModelInferRequest {
            parameters: parameters([("priority", value.clone()), ("timeout", value)]),
            ..Default::default()
        })
        .unwrap();
        assert_eq!(raw.priority, 3);
        assert_eq!(raw.deadline, Some(Timestamp::from_nanos(1_003_000)));
    }
    for value in [Int64Param(0), Uint64Param(0), StringParam("0".into())] {
        let parameters = parameters([("timeout", value)]);
        assert_eq!(
            Parameters::read(&parameters).unwrap(),
            Parameters::default()
        );
    }
    let table = [
        (Int64Param(-1), "int64_param -1"),
        (DoubleParam(0.5), "double_param 0.5"),
        (BoolParam(true), "bool_param true"),
        (StringParam("soon".into()), "string_param 'soon'"),
    ];
    for (value, got) in table {
        refused(
            pb::ModelInferRequest {
                parameters: parameters([("timeout", value)]),
                ..Default::default()
            },
            ErrorCode::InvalidRequest,
            &format!(
                "unexpected value for parameter 'timeout': expected a whole number that is not \
                 negative, got {got}"
            ),
        );
    }
}

#[test]
fn the_longest_timeout_is_no_accident() {
    let raw = read(pb::ModelInferRequest {
        parameters: parameters([("timeout", ParameterChoice::Uint64Param(u64::MAX))]),
        ..Default::default()
    });
    assert_eq!(raw.unwrap().deadline, Some(Timestamp::from_nanos(u64::MAX)));
}

#[test]
fn a_sequence_is_named_by_a_number_or_a_string() {
    use ParameterChoice::*;
    let step = |id| {
        let read = Parameters::read(&parameters([
            ("sequence_id", id),
            ("sequence_start", BoolParam(true)),
            ("sequence_end", BoolParam(false)),
        ]));
        read.unwrap().sequence.step().map(|sequence| sequence.step)
    };
    let expected = |id| {
        Some(Step {
            id,
            start: true,
            end: false,
        })
    };
    assert_eq!(step(Uint64Param(7)), expected(SequenceId::Number(7)));
    assert_eq!(step(Int64Param(-1)), expected(SequenceId::Number(u64::MAX)));
    let text = SequenceId::Text("a".into());
    assert_eq!(step(StringParam("a".into())), expected(text));
    for none in [Uint64Param(0), Int64Param(0), StringParam(String::new())] {
        assert_eq!(step(none), None);
    }
    for (name, value) in [
        ("sequence_id", DoubleParam(1.0)),
        ("sequence_start", Int64Param(1)),
        ("sequence_end", StringParam("true".into())),
    ] {
        let error = Parameters::read(&parameters([(name, value)])).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidRequest);
        assert!(error.message().contains(&format!("'{name}'")), "{error}");
    }
}

#[test]
fn own_parameters_are_the_clients_business() {
    use ParameterChoice::*;
    let parameters = parameters([
        ("binary_data_output", BoolParam(true)),
        ("anything", DoubleParam(1.0)),
        ("triton_enable_empty_final_response", BoolParam(true)),
    ]);
    assert_eq!(
        Parameters::read(&parameters).unwrap(),
        Parameters::default()
    );
}

#[test]
fn reserved_parameters_are_refused() {
    let wrong = parameters([("triton_magic", ParameterChoice::BoolParam(true))]);
    assert!(
        Parameters::read(&wrong)
            .unwrap_err()
            .message()
            .contains("'triton_magic'")
    );
    let wrong = parameters([(
        "triton_enable_empty_final_response",
        ParameterChoice::Int64Param(1),
    )]);
    assert!(
        Parameters::read(&wrong)
            .unwrap_err()
            .message()
            .contains("expected a bool")
    );
}

#[test]
fn shared_memory_and_classification_are_read_from_the_tensors_parameters() {
    use ParameterChoice::*;
    let in_region = |name: &str, offset| InferInputTensor {
        parameters: parameters([
            ("shared_memory_region", StringParam("r".into())),
            ("shared_memory_byte_size", Int64Param(64)),
            ("shared_memory_offset", Int64Param(offset)),
        ]),
        ..input(name, "INT8", &[64])
    };
    let wanted = |name: &str, parameters| InferRequestedOutputTensor {
        name: name.into(),
        parameters,
    };
    let slice = |offset| RegionSlice {
        region: "r".into(),
        offset,
        byte_size: 64,
    };
    let request = read(pb::ModelInferRequest {
        inputs: vec![
            in_region("a", 0),
            input("b", "INT8", &[1]),
            in_region("c", 64),
        ],
        outputs: vec![
            wanted("x", parameters([("classification", Int64Param(3))])),
            wanted("y", in_region("", 8).parameters),
            wanted("z", parameters([("classification", Int64Param(0))])),
        ],
        raw_input_contents: vec![Bytes::from_static(&[7])],
        ..Default::default()
    })
    .unwrap();
    let lengths: Vec<usize> = request.inputs.iter().map(|i| i.data.len()).collect();
    assert_eq!(lengths, [0, 1, 0]);
    let wishes = *request.wishes.unwrap();
    assert_eq!(wishes.inputs, [(0, slice(0)), (2, slice(64))]);
    assert_eq!(
        wishes.outputs,
        [
            ("x".to_owned(), OutputWish::Classes(3)),
            ("y".to_owned(), OutputWish::Region(slice(8))),
        ]
    );
    let output = |parameters| pb::ModelInferRequest {
        outputs: vec![wanted("y", parameters)],
        ..Default::default()
    };
    refused(
        output(parameters([("shared_memory_offset", Int64Param(3))])),
        ErrorCode::InvalidRequest,
        "output 'y' of model 'm': parameter 'shared_memory_offset' is given without \
         'shared_memory_region'",
    );
    refused(
        output(parameters([(
            "shared_memory_region",
            StringParam("r".into()),
        )])),
        ErrorCode::InvalidRequest,
        "output 'y' of model 'm': parameter 'shared_memory_region' is given without \
         'shared_memory_byte_size'",
    );
    refused(
        output(parameters([("classification", Int64Param(-1))])),
        ErrorCode::InvalidRequest,
        "unexpected value for parameter 'classification': expected a whole number that is not \
         negative, got int64_param -1",
    );
    let plain = read(output(parameters([("binary_data", BoolParam(true))]))).unwrap();
    assert!(plain.wishes.is_none());
}
