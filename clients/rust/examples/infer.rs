//! Runs a model on zeros of the shapes and types that its metadata asks for.
//!
//! ```sh
//! cargo run -p dormouse-client --example infer -- MODEL [http://127.0.0.1:8001]
//! ```

use anyhow::Context;
use dormouse_client::{Client, DataType, InferRequest, Tensor};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().context("usage: infer MODEL [URL]")?;
    let url = arguments.next();
    let client = Client::connect(url.as_deref().unwrap_or("http://127.0.0.1:8001")).await?;

    let metadata = client.model_metadata(&model, "").await?;
    let mut request = InferRequest::new(&model);
    for input in metadata.inputs {
        // Open dimensions, the batch among them, get one element.
        let shape: Vec<i64> = input.shape.iter().map(|dim| (*dim).max(1)).collect();
        let elements: usize = shape.iter().map(|dim| *dim as usize).product();
        let tensor = match input.datatype {
            DataType::Bytes => Tensor::bytes(shape, vec![""; elements])?,
            fixed => {
                let size = fixed.element_size().context("a type of fixed size")?;
                Tensor::raw(fixed, shape, vec![0u8; elements * size])?
            }
        };
        request = request.input(input.name, tensor);
    }

    let response = client.infer(request).await?;
    eprintln!("{} version {}", response.model(), response.model_version());
    for (name, tensor) in response.outputs() {
        let size = tensor.data().len();
        eprintln!(
            "  {name}: {} {:?}, {size} bytes",
            tensor.datatype(),
            tensor.shape()
        );
        if let Ok(values) = tensor.as_slice::<f32>() {
            eprintln!("    {:?}", &values[..values.len().min(8)]);
        }
    }
    if let Some(cold) = response.timing() {
        eprintln!("the model was asleep; waking it took {:?}", cold.total);
        for stage in &cold.stages {
            eprintln!("  {}: {:?}", stage.name, stage.duration);
        }
    }
    Ok(())
}
