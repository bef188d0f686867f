//! Dormouse's own client against Dormouse.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_client::{
    Client, ClientError, Code, DataType, InferRequest, LoadRequest, ModelState, Tensor,
};

use crate::repository::{Model, TestRepository};
use crate::server::TestServer;

async fn connect(server: &TestServer) -> Result<Client> {
    Ok(Client::connect(format!("http://{}", server.grpc)).await?)
}

/// What Dormouse's client sends to a model that adds and subtracts, called `simple`.
pub(crate) fn add_sub(left: i32, right: i32) -> Result<InferRequest> {
    Ok(InferRequest::new("simple")
        .input("INPUT0", Tensor::from_vec([1, 16], vec![left; 16])?)
        .input("INPUT1", Tensor::from_vec([1, 16], vec![right; 16])?))
}

#[tokio::test]
async fn a_call_tells_of_its_cold_start_and_streams_follow() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("words", Model::new("identity_bytes"))?;
    let mut server = TestServer::over(&repository).start().await?;
    let client = connect(&server).await?;
    ensure!(client.live().await? && client.ready().await?);
    ensure!(client.model_ready("simple", "").await?);
    let metadata = client.model_metadata("simple", "").await?;
    ensure!(
        metadata.inputs[0].datatype == DataType::Int32,
        "{metadata:?}"
    );

    let response = client
        .infer(add_sub(5, 3)?.id("first").output("OUTPUT1"))
        .await?;
    let cold = response.timing().context("the model was not asleep")?;
    ensure!(
        cold.stages.iter().any(|stage| stage.name == "session"),
        "{cold:?}"
    );
    ensure!(response.id() == "first" && response.outputs().len() == 1);
    ensure!(response.output("OUTPUT1")?.to_vec::<i32>()? == [2; 16]);
    ensure!(client.infer(add_sub(5, 3)?).await?.timing().is_none());

    let words = Tensor::bytes([1, 3], ["", "Haselmaus", "\u{1f42d}"])?;
    let response = client
        .infer(InferRequest::new("words").input("INPUT", words))
        .await?;
    ensure!(response.output("OUTPUT")?.strings()? == ["", "Haselmaus", "\u{1f42d}"]);

    let (sender, mut receiver) = client.stream().split();
    let sender = sender.context("a new stream can be sent on")?;
    for i in 0..20 {
        sender.send(add_sub(i, 1)?.id(i.to_string())).await?;
    }
    drop(sender);
    let mut seen = 0;
    while let Some(response) = receiver.next().await {
        let response = response?;
        let i: i32 = response.id().parse()?;
        ensure!(response.output("OUTPUT0")?.to_vec::<i32>()? == [i + 1; 16]);
        seen += 1;
    }
    ensure!(seen == 20, "{seen} answers to 20 requests");
    server.assert_healthy().await
}

#[tokio::test]
async fn errors_keep_their_codes() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("slow", Model::new("slow"))?;
    let server = TestServer::over(&repository).start().await?;
    let client = connect(&server).await?;
    let code = |result: Result<_, ClientError>| match result {
        Ok(_) => None,
        Err(error) => error.code(),
    };
    let unknown = client.infer(InferRequest::new("nobody")).await;
    ensure!(code(unknown) == Some(Code::NotFound));
    let incomplete = client.infer(InferRequest::new("simple")).await;
    ensure!(code(incomplete) == Some(Code::InvalidArgument));
    let endless = InferRequest::new("slow")
        .input("ITERATIONS", Tensor::from_slice([1], &[100_000_000i64])?)
        .deadline(Duration::from_millis(200));
    ensure!(code(client.infer(endless).await) == Some(Code::DeadlineExceeded));
    Ok(())
}

#[tokio::test]
async fn the_repository_is_managed_by_hand_in_explicit_mode() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let client = connect(&server).await?;
    ensure!(client.infer(add_sub(1, 1)?).await.is_err());
    let config = r#"{"backend":"onnxruntime","max_batch_size":2}"#;
    client
        .load(LoadRequest::new("simple").config(config))
        .await?;
    client.infer(add_sub(1, 1)?).await?;
    let index = client.repository_index(true).await?;
    ensure!(
        index.len() == 1 && index[0].state == ModelState::Ready,
        "{index:?}"
    );
    client.unload("simple").await?;
    ensure!(client.repository_index(true).await?.is_empty());
    Ok(())
}
