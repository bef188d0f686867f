use std::time::Duration;

use dormouse_client::{
    Client, ClientError, Code, DataType, InferRequest, LoadRequest, ModelState, Parameter, Tensor,
};

use crate::fake::FakeServer;

#[tokio::test]
async fn tensors_go_there_and_back_unchanged() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let numbers = Tensor::from_slice([2, 2], &[1.5f32, -2.0, 0.0, 4.0]).unwrap();
    let words = Tensor::bytes([2], ["", "mouse"]).unwrap();
    let request = InferRequest::new("echo")
        .id("seven")
        .input("numbers", numbers.clone())
        .input("words", words.clone())
        .priority(1)
        .parameter("language", "en");
    let response = client.infer(request).await.unwrap();
    assert_eq!(response.id(), "seven");
    assert_eq!(response.model_version(), "1");
    assert_eq!(response.output("numbers").unwrap(), &numbers);
    assert_eq!(response.output("words").unwrap(), &words);
    assert_eq!(response.outputs().len(), 2);
    assert_eq!(response.parameter("priority"), Some(&Parameter::Uint(1)));
    assert_eq!(
        response.parameter("language"),
        Some(&Parameter::Text("en".to_owned()))
    );
    assert_eq!(response.timing(), None);
}

#[tokio::test]
async fn large_tensors_pass_with_and_without_compression() {
    let server = FakeServer::start().await;
    let large = Tensor::from_vec([6 << 20], vec![7u8; 6 << 20]).unwrap();
    for builder in [
        Client::builder(&server.url),
        Client::builder(&server.url).gzip(),
    ] {
        let client = builder.connect().await.unwrap();
        let request = InferRequest::new("echo").input("x", large.clone());
        let response = client.infer(request).await.unwrap();
        assert_eq!(response.output("x").unwrap(), &large);
    }
}

#[tokio::test]
async fn messages_above_the_limit_are_refused() {
    let server = FakeServer::start().await;
    let client = Client::builder(&server.url).max_message_size(1 << 10);
    let client = client.connect().await.unwrap();
    let large = Tensor::from_vec([2 << 10], vec![7u8; 2 << 10]).unwrap();
    let request = InferRequest::new("echo").input("x", large);
    let error = client.infer(request).await.unwrap_err().to_string();
    assert_eq!(
        error,
        "the request takes 2073 bytes, more than the 1024 allowed"
    );
    assert_eq!(server.attempts(), 0);
}

#[tokio::test]
async fn a_cold_start_comes_with_its_timeline() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let response = client.infer(InferRequest::new("cold")).await.unwrap();
    let cold = response.timing().unwrap();
    assert_eq!(cold.total, Duration::from_micros(12_300));
    let names: Vec<_> = cold
        .stages
        .iter()
        .map(|stage| stage.name.as_str())
        .collect();
    assert_eq!(names, ["read", "session"]);
}

#[tokio::test]
async fn typed_contents_are_understood() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let response = client.infer(InferRequest::new("typed")).await.unwrap();
    assert_eq!(
        response.output("y").unwrap().to_vec::<f32>().unwrap(),
        [0.5, 2.0]
    );
}

#[tokio::test]
async fn metadata_and_what_is_left_of_the_deadline_reach_the_server() {
    let server = FakeServer::start().await;
    let client = Client::builder(&server.url).metadata("authorization", "Bearer 12");
    let client = client.connect().await.unwrap();
    let request = InferRequest::new("echo").deadline(Duration::from_secs(40));
    let response = client.infer(request).await.unwrap();
    let bearer = Parameter::Text("Bearer 12".to_owned());
    assert_eq!(response.parameter("authorization"), Some(&bearer));
    let Some(Parameter::Text(left)) = response.parameter("grpc-timeout") else {
        panic!("no timeout was sent");
    };
    assert!(left.starts_with('3') || left.starts_with("40"), "{left}");
}

#[tokio::test]
async fn an_unknown_model_is_an_error_with_the_servers_words() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let error = client.infer(InferRequest::new("nobody")).await.unwrap_err();
    assert_eq!(error.to_string(), "model \"nobody\" is unknown (NotFound)");
    assert_eq!(error.code(), Some(Code::NotFound));
    assert_eq!(server.attempts(), 1);
}

#[tokio::test]
async fn an_address_without_a_server_is_named() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let url = format!("http://127.0.0.1:{port}");
    let error = Client::connect(&url).await.unwrap_err();
    assert_eq!(error.to_string(), format!("cannot connect to {url}"));
    let builder = Client::builder(&url).retry(dormouse_client::RetryPolicy::NEVER);
    let error = builder.connect_lazy().unwrap().live().await.unwrap_err();
    let ClientError::Connect { source, .. } = &error else {
        panic!("{error:?}");
    };
    assert!(source.to_string().contains("refused"), "{source}");
}

#[tokio::test]
async fn server_and_models_describe_themselves() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    assert!(client.live().await.unwrap());
    assert!(!client.ready().await.unwrap());
    assert!(client.model_ready("echo", "2").await.unwrap());
    assert!(!client.model_ready("echo", "").await.unwrap());
    let about = client.server_metadata().await.unwrap();
    assert_eq!(
        (about.name.as_str(), about.version.as_str()),
        ("fake", "1.2")
    );
    let model = client.model_metadata("echo", "").await.unwrap();
    assert_eq!(model.versions, ["1", "2"]);
    assert_eq!(model.inputs[0].datatype, DataType::Int64);
    assert_eq!(model.inputs[0].shape, [-1, 3]);
    let error = client.model_metadata("exotic", "").await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor \"x\": unknown element type \"FP8\""
    );
    assert_eq!(
        client
            .model_config("echo", "")
            .await
            .unwrap()
            .max_batch_size,
        8
    );
    let error = client.model_config("bare", "").await.unwrap_err();
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    assert_eq!(
        client.statistics("", "").await.unwrap()[0].inference_count,
        3
    );
}

#[tokio::test]
async fn the_repository_is_listed_loaded_and_unloaded() {
    let server = FakeServer::start().await;
    let client = Client::connect(&server.url).await.unwrap();
    let index = client.repository_index(false).await.unwrap();
    let states: Vec<_> = index.iter().map(|entry| entry.state.clone()).collect();
    let unknown = ModelState::Other(String::new());
    assert_eq!(
        states,
        [ModelState::Ready, ModelState::Unavailable, unknown]
    );
    assert_eq!(index[1].reason, "no graph");
    assert_eq!(client.repository_index(true).await.unwrap().len(), 1);
    client.load("echo").await.unwrap();
    client.unload("echo").await.unwrap();
    let request = LoadRequest::new("echo")
        .config("{}")
        .file("1/model.onnx", &b"abc"[..]);
    let seen = client.load(request).await.unwrap_err().to_string();
    assert!(
        seen.contains("\"config\"") && seen.contains("StringParam(\"{}\")"),
        "{seen}"
    );
    assert!(seen.contains("\"file:1/model.onnx\"") && seen.contains("BytesParam(b\"abc\")"));
    let seen = client
        .unload_dependents("echo")
        .await
        .unwrap_err()
        .to_string();
    assert!(seen.contains("unload_dependents") && seen.contains("BoolParam(true)"));
}
