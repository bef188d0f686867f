use proptest::prelude::*;

use super::*;

fn spec() -> SessionSpec {
    SessionSpec {
        intra_op_threads: Some(2),
        memory_arena: Some(false),
        graph_level: GraphLevel::Basic,
        entries: [("session.x".to_owned(), "1".to_owned())].into(),
        shrinks_arena: true,
        ..SessionSpec::default()
    }
}

fn placed_somewhere() -> Placed {
    Placed {
        datatype: DataType::Fp32,
        shape: Shape::from_slice(&[2, 3]),
        segment: 4,
        offset: 64,
        len: 24,
    }
}

fn tensor(name: &str) -> SessionTensor {
    SessionTensor {
        name: name.to_owned(),
        datatype: None,
        dims: None,
    }
}

#[test]
fn every_request_is_read_as_it_was_written() {
    let source = SourceForm::Blob {
        graph: 12,
        external: vec![("weights.bin".to_owned(), 34)],
    };
    let requests = [
        Request::Open {
            session: spec(),
            effort: Effort::Least,
            source: source.clone(),
        },
        Request::OpenPrepared {
            session: SessionSpec::default(),
            packing: Packing::On,
            family: Some([7; 32]),
            packs: vec!["d1".to_owned(), "d2".to_owned()],
            weights: vec![PackedWeight {
                name: "w".to_owned(),
                element_type: 1,
                dims: vec![2, -3],
                pack: 1,
                offset: 64,
                len: 24,
            }],
            populate: true,
        },
        Request::Optimize {
            session: spec(),
            source: SourceForm::File,
            scratch: "/tmp/x".into(),
        },
        Request::Run(RunRequest {
            call: 5,
            session: 6,
            new: vec![1, 2],
            forgotten: vec![3],
            inputs: vec![(0, placed_somewhere())],
            outputs: vec![1, 0],
            room: 2,
        }),
        Request::Room {
            segment: 3,
            is_new: true,
        },
        Request::Release { session: 8 },
    ];
    for request in requests {
        assert_eq!(Request::decode(request.encode().bytes()), Ok(request));
    }
}

#[test]
fn every_reply_and_notice_is_read_as_it_was_written() {
    let replies = [
        Reply::Ready,
        Reply::Done,
        Reply::Opened {
            session: 3,
            inputs: vec![tensor("x")],
            optional_inputs: vec![],
            outputs: vec![tensor("y"), tensor("z")],
        },
        Reply::Optimized {
            tensors: vec![OptimizedTensor {
                name: "w".to_owned(),
                element_type: 10,
                dims: vec![4],
                offset: 0,
                len: 8,
            }],
            by_rows: vec!["w".to_owned()],
            data_file: Some("data".into()),
        },
        Reply::Ran(vec![placed_somewhere()]),
        Reply::NeedsRoom(1 << 40),
        Reply::Failed("why".to_owned()),
        Reply::NotPreparable("why not".to_owned()),
        Reply::Terminated,
    ];
    for reply in replies {
        assert_eq!(Reply::decode(reply.encode().bytes()), Ok(reply));
    }
    let notices = [
        Notice::Lane,
        Notice::Stop { call: 9 },
        Notice::Close { session: 1 },
    ];
    for notice in notices {
        assert_eq!(Notice::decode(notice.encode().bytes()), Ok(notice));
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_decoders_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Request::decode(&bytes);
        let _ = Reply::decode(&bytes);
        let _ = Notice::decode(&bytes);
        let _ = Hello::decode(&bytes);
    }
}

#[test]
fn outputs_have_the_bytes_that_their_shapes_say() {
    let with = |datatype, shape: &[i64], len| Placed {
        datatype,
        shape: Shape::from_slice(shape),
        len,
        ..placed_somewhere()
    };
    for (placed, makes_sense) in [
        (placed_somewhere(), true),
        (with(DataType::Fp32, &[2, 3], 23), false),
        (with(DataType::Fp32, &[-1, 3], 24), false),
        (with(DataType::Fp64, &[i64::MAX], 24), false),
        (with(DataType::Fp32, &[], 4), true),
        (with(DataType::Bytes, &[2], 100), true),
        (with(DataType::Bytes, &[26], 100), false),
        (with(DataType::Bytes, &[-2], 100), false),
    ] {
        assert_eq!(placed.makes_sense(), makes_sense, "{placed:?}");
    }
}
