use dormouse_core::id::ByteSize;
use futures_util::FutureExt;
use futures_util::stream;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::super::tests::fake::{Fake, request};
use super::*;

fn terms(fail_fast: bool, in_flight: usize) -> StreamTerms {
    StreamTerms {
        time: CallTime {
            received: Default::default(),
            deadline: None,
        },
        fail_fast,
        in_flight,
        caller: None,
        quota: None,
        regions_of: None,
        limits: RequestLimits::default(),
    }
}

type Answers = BoxStream<'static, Result<StreamAnswer, Status>>;

/// As the function of this name, for requests as they come off the wire.
fn answers<R>(fake: Fake, requests: R, terms: StreamTerms, shutdown: CancellationToken) -> Answers
where
    R: Stream<Item = Result<pb::ModelInferRequest, Status>> + Send + 'static,
{
    let received = requests.map(|request| {
        request.map(|message| Received {
            bytes: message.encoded_len(),
            message,
        })
    });
    super::answers(fake, received, terms, shutdown)
}

fn answering(fake: &Fake, requests: &[(&str, &str)], terms: StreamTerms) -> Answers {
    let requests: Vec<_> = requests
        .iter()
        .map(|(model, id)| Ok(request(model, id, "x")))
        .collect();
    answers(
        fake.clone(),
        stream::iter(requests),
        terms,
        CancellationToken::new(),
    )
}

fn id(answer: Option<Result<StreamAnswer, Status>>) -> String {
    match answer.unwrap().unwrap() {
        StreamAnswer::Answer(answer) => answer.0.id,
        StreamAnswer::Failure { id, .. } => id,
    }
}

#[tokio::test]
async fn answers_keep_the_order_of_their_requests() {
    let fake = Fake::new();
    let mut answers = answering(&fake, &[("gate", "1"), ("echo", "2")], terms(false, 8));
    assert!(answers.next().now_or_never().is_none());
    fake.open_gate(1);
    assert_eq!(id(answers.next().await), "1");
    assert_eq!(id(answers.next().await), "2");
    assert!(answers.next().await.is_none());
}

#[tokio::test]
async fn an_error_is_a_message_and_the_stream_goes_on() {
    let fake = Fake::new();
    let mut answers = answering(&fake, &[("nobody", "1"), ("echo", "2")], terms(false, 8));
    let Some(Ok(StreamAnswer::Failure {
        message,
        id: failed,
        model_name,
        ..
    })) = answers.next().await
    else {
        panic!("expected a failure");
    };
    assert_eq!(message, "unknown model 'nobody'");
    assert_eq!((failed.as_str(), model_name.as_str()), ("1", "nobody"));
    assert_eq!(id(answers.next().await), "2");
    assert!(answers.next().await.is_none());
}

#[tokio::test]
async fn an_error_is_a_status_for_clients_that_ask() {
    let fake = Fake::new();
    let mut answers = answering(&fake, &[("echo", "1"), ("nobody", "2")], terms(true, 8));
    assert_eq!(id(answers.next().await), "1");
    let status = answers.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[test]
fn clients_ask_for_statuses_by_header() {
    for (value, expected) in [
        ("true", true),
        ("True", true),
        ("false", false),
        ("1", false),
    ] {
        let mut headers = HeaderMap::new();
        assert!(!wants_status(&headers));
        headers.insert("triton_grpc_error", value.parse().unwrap());
        assert_eq!(wants_status(&headers), expected, "{value}");
    }
}

#[tokio::test]
async fn only_so_many_requests_are_under_way() {
    let fake = Fake::new();
    let mut answers = answering(&fake, &[("gate", ""); 10], terms(false, 3));
    assert!(answers.next().now_or_never().is_none());
    assert_eq!(fake.most_active(), 3);
    fake.open_gate(10);
    for _ in 0..10 {
        assert!(answers.next().await.unwrap().is_ok());
    }
    assert_eq!(fake.most_active(), 3);
}

#[tokio::test]
async fn dropping_the_stream_cancels_what_is_under_way() {
    let fake = Fake::new();
    let mut answers = answering(&fake, &[("deaf", ""); 4], terms(false, 8));
    assert!(answers.next().now_or_never().is_none());
    drop(answers);
    fake.until_cancelled(4).await;
    fake.until_active(0).await;
}

#[tokio::test]
async fn a_broken_request_ends_the_stream_after_the_answers_before_it() {
    let fake = Fake::new();
    let requests = stream::iter([
        Ok(request("echo", "1", "x")),
        Err(Status::out_of_range("too large")),
    ]);
    let mut answers = answers(fake, requests, terms(false, 8), CancellationToken::new());
    assert_eq!(id(answers.next().await), "1");
    let status = answers.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
}

#[tokio::test]
async fn shutdown_answers_what_was_read_and_then_ends_the_stream() {
    let fake = Fake::new();
    let shutdown = CancellationToken::new();
    let (send, requests) = mpsc::channel(8);
    let requests = ReceiverStream::new(requests);
    let mut answers = answers(fake.clone(), requests, terms(false, 8), shutdown.clone());
    send.send(Ok(request("gate", "1", "x"))).await.unwrap();
    assert!(answers.next().now_or_never().is_none());
    shutdown.cancel();
    assert!(answers.next().now_or_never().is_none());
    fake.open_gate(1);
    assert_eq!(id(answers.next().await), "1");
    let status = answers.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

fn step(model: &str, id: &str) -> Result<pb::ModelInferRequest, Status> {
    let mut step = request(model, id, "x");
    let number = pb::InferParameter {
        parameter_choice: Some(pb::infer_parameter::ParameterChoice::Int64Param(7)),
    };
    step.parameters.insert("sequence_id".to_owned(), number);
    Ok(step)
}

fn asking(
    requests: Vec<Result<pb::ModelInferRequest, Status>>,
    in_flight: usize,
) -> (Fake, Answers) {
    let fake = Fake::new();
    let answers = answers(
        fake.clone(),
        stream::iter(requests),
        terms(false, in_flight),
        CancellationToken::new(),
    );
    (fake, answers)
}

#[tokio::test]
async fn steps_that_wait_do_not_keep_the_stream_from_being_read() {
    // As if all waited for a slot that only the last request gives back.
    let mut requests: Vec<_> = (0..20)
        .map(|index| step("gate", &index.to_string()))
        .collect();
    requests.push(step("opens", "20"));
    let (_fake, mut answers) = asking(requests, 2);
    for index in 0..=20 {
        assert_eq!(id(answers.next().await), index.to_string());
    }
    assert!(answers.next().await.is_none());
}

#[tokio::test]
async fn steps_that_wait_are_bounded_too() {
    let requests = (0..100).map(|_| step("gate", "")).collect();
    let (fake, mut answers) = asking(requests, 3);
    assert!(answers.next().now_or_never().is_none());
    assert_eq!(fake.most_active(), 3 * ordered::BEHIND_STEPS);
    fake.open_gate(100);
    for _ in 0..100 {
        assert!(answers.next().await.unwrap().is_ok());
    }
    assert!(answers.next().await.is_none());
}

#[tokio::test]
async fn behind_a_step_other_requests_are_read_but_no_more_run_at_once() {
    let mut requests = vec![step("gate", "")];
    requests.extend((0..20).map(|_| Ok(request("echo", "", "x"))));
    requests.extend((0..20).map(|_| Ok(request("deaf", "", "x"))));
    let (fake, mut answers) = asking(requests, 4);
    assert!(answers.next().now_or_never().is_none());
    // The step, and of the others as many as ever: those that have their answers do not count.
    assert_eq!(fake.most_active(), 5);
    drop(answers);
    fake.until_cancelled(5).await;
}

#[tokio::test]
async fn a_request_without_a_sequence_keeps_no_step_waiting() {
    let mut none = request("deaf", "1", "x");
    let zero = pb::InferParameter {
        parameter_choice: Some(pb::infer_parameter::ParameterChoice::Int64Param(0)),
    };
    none.parameters.insert("sequence_id".to_owned(), zero);
    let (fake, mut answers) = asking(vec![Ok(none), step("turns", "2")], 4);
    assert!(answers.next().now_or_never().is_none());
    assert_eq!(fake.turns(), 1);
}

#[tokio::test]
async fn tensors_count_against_a_quota_wherever_a_request_has_them() {
    let fake = Fake::new();
    let mut typed = request("echo", "1", "x");
    typed.raw_input_contents.clear();
    typed.inputs[0].contents = Some(pb::InferTensorContents {
        fp32_contents: vec![0.5; 1000],
        ..Default::default()
    });
    let terms = StreamTerms {
        quota: Some(StreamQuota::of_bytes(1000)),
        ..terms(false, 8)
    };
    let requests = stream::iter([Ok(typed), Ok(request("echo", "2", "x"))]);
    let mut answers = answers(fake, requests, terms, CancellationToken::new());
    let Some(Ok(StreamAnswer::Failure { message, .. })) = answers.next().await else {
        panic!("expected a refusal");
    };
    assert!(message.contains("quota"), "{message}");
    assert_eq!(id(answers.next().await), "2");
}

/// What was refused, and the ids of all that came.
async fn refusals(answers: &mut Answers) -> (Vec<String>, Vec<String>) {
    let (mut refused, mut ids) = (Vec::new(), Vec::new());
    while let Some(answer) = answers.next().await {
        let answer = answer.unwrap();
        if let StreamAnswer::Failure { message, .. } = &answer {
            refused.push(message.clone());
        }
        ids.push(id(Some(Ok(answer))));
    }
    (refused, ids)
}

#[tokio::test]
async fn requests_in_quick_succession_are_refused_one_by_one_and_the_stream_goes_on() {
    const BYTES: usize = 100 << 10;
    let fake = Fake::new();
    let quota = StreamQuota::of_bytes(256 << 10);
    let terms = StreamTerms {
        quota: Some(quota.clone()),
        ..terms(false, 64)
    };
    let requests = stream::iter(0..10).map(move |index| {
        let received = quota.receive(BYTES);
        received.map_err(|refusal| refusal.status())?;
        Ok(request("gate", &index.to_string(), vec![0; BYTES]))
    });
    let mut answers = answers(fake.clone(), requests, terms, CancellationToken::new());
    fake.open_gate(2);
    let (refused, ids) = refusals(&mut answers).await;
    assert_eq!(refused.len(), 8, "{refused:?}");
    assert!(refused.iter().all(|why| why.contains("quota")));
    assert_eq!(ids, ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]);
}

#[tokio::test]
async fn requests_count_as_bytes_in_flight_from_when_they_are_read() {
    let fake = Fake::with_room(ByteSize::mib(4));
    let mut requests: Vec<_> = (0..3)
        .map(|_| Ok(request("gate", "", vec![0; 1 << 20])))
        .collect();
    requests.push(Ok(request("gate", "small", "x")));
    requests.push(Ok(request("gate", "large", vec![0; 1 << 20])));
    let requests = stream::iter(requests);
    let shutdown = CancellationToken::new();
    let mut answers = answers(fake.clone(), requests, terms(false, 8), shutdown);
    assert!(answers.next().now_or_never().is_none());
    let in_flight = fake.in_flight().unwrap();
    assert!((3 << 20..4 << 20).contains(&in_flight.used()));
    fake.open_gate(4);
    let (refused, _) = refusals(&mut answers).await;
    let [why] = &refused[..] else {
        panic!("{refused:?}");
    };
    assert!(why.contains("max_request_bytes_in_flight"), "{why}");
    assert_eq!(in_flight.used(), 0);
}
