//! Sends ten requests over one stream and prints the answers as they come.
//!
//! ```sh
//! cargo run -p dormouse-client --example stream -- MODEL [http://127.0.0.1:8001]
//! ```

use anyhow::Context;
use dormouse_client::{Client, ClientError, InferRequest, Tensor};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().context("usage: stream MODEL [URL]")?;
    let url = arguments.next();
    let client = Client::connect(url.as_deref().unwrap_or("http://127.0.0.1:8001")).await?;

    // Zeros of the shapes and types that the metadata asks for; open dimensions get one element.
    let mut zeros = InferRequest::new(&model);
    for input in client.model_metadata(&model, "").await?.inputs {
        let shape: Vec<i64> = input.shape.iter().map(|dim| (*dim).max(1)).collect();
        let elements: usize = shape.iter().map(|dim| *dim as usize).product();
        // An element of BYTES is its length, four bytes, and then nothing.
        let size = input.datatype.element_size().unwrap_or(4);
        let tensor = Tensor::raw(input.datatype, shape, vec![0u8; elements * size])?;
        zeros = zeros.input(input.name, tensor);
    }

    let (sender, mut receiver) = client.stream().split();
    let sender = sender.context("a new stream can be sent on")?;
    let sending = tokio::spawn(async move {
        for number in 0..10u8 {
            sender.send(zeros.clone().id(number.to_string())).await?;
        }
        Ok::<(), ClientError>(())
    });
    while let Some(response) = receiver.next().await {
        match response {
            Ok(response) => {
                for (name, tensor) in response.outputs() {
                    eprintln!("{}: {name} {:?}", response.id(), tensor.shape());
                }
            }
            Err(ClientError::Request { id, message }) => eprintln!("{id}: {message}"),
            Err(error) => return Err(error.into()),
        }
    }
    sending.await??;
    Ok(())
}
