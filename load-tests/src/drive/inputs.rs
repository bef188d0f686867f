//! What requests carry: random tensors that fit a model's signature, or recorded ones.

mod recorded;

use anyhow::{Context, Result, bail, ensure};
use dormouse_client::{DataType, Tensor};
use half::{bf16, f16};

use super::check::{Expected, Reference};
use super::connect::{Call, Connected, InputSpec, Prepared};
use super::dice::Dice;
use super::scenario::dimension::Drawn;
use super::scenario::{Check, Dimension, ModelLoad};

/// Requests of one model may take this many bytes together.
const MOST_BYTES: usize = 256 << 20;
/// Elements of one random tensor.
const MOST_ELEMENTS: usize = 256 << 20;

/// A request that is ready to be sent, with what is known of its answer.
#[derive(Debug)]
pub(crate) struct ReadyRequest {
    pub(crate) prepared: Prepared,
    pub(crate) reference: Reference,
}

/// The requests of a model: those recorded, or a few random ones.
pub(crate) async fn requests(
    load: &ModelLoad,
    server: &Connected,
    dice: &mut Dice,
) -> Result<Vec<ReadyRequest>> {
    let ready = |inputs, outputs: Option<_>| {
        let call = Call {
            model: load.name.clone(),
            version: load.version.clone(),
            inputs,
            deadline: load.deadline,
        };
        let reference = match (outputs, load.check) {
            (Some(outputs), _) => Reference::Recorded(Expected::new(outputs, load.tolerance)),
            (None, Check::Consistent) => Reference::first(load.tolerance),
            (None, Check::Expected) => Reference::Nothing,
        };
        anyhow::Ok(ReadyRequest {
            prepared: server.prepare(&call)?,
            reference,
        })
    };
    if let Some(path) = &load.recorded {
        let pairs = recorded::read(path, load.expected.as_deref())?.into_iter();
        return pairs.map(|pair| ready(pair.inputs, pair.outputs)).collect();
    }
    let specs = server.inputs(&load.name, &load.version).await?;
    ensure!(
        !specs.is_empty(),
        "the server tells no inputs of model '{}': a recorded request is needed",
        load.name
    );
    for name in load.shapes.keys().chain(load.values.keys()) {
        ensure!(
            specs.iter().any(|spec| spec.name == *name),
            "model '{}' has no input '{name}'; it has {}",
            load.name,
            names(&specs)
        );
    }
    let mut bytes = 0usize;
    let mut requests = Vec::new();
    while requests.len() < load.variants && (requests.is_empty() || bytes < MOST_BYTES) {
        let drawn = load.dims.iter().map(|(name, sizes)| {
            let size = sizes.draw(dice, &Drawn::new());
            (name.as_str(), size)
        });
        let drawn: Drawn = drawn.collect();
        let mut inputs = Vec::with_capacity(specs.len());
        for spec in &specs {
            let tensor = random(load, spec, &drawn, dice)
                .with_context(|| format!("input '{}' of model '{}'", spec.name, load.name))?;
            bytes = bytes.saturating_add(tensor.data().len());
            inputs.push((spec.name.clone(), tensor));
        }
        requests.push(ready(inputs, None)?);
    }
    Ok(requests)
}

/// A random tensor that fits.
fn random(
    load: &ModelLoad,
    spec: &InputSpec,
    drawn: &Drawn<'_>,
    dice: &mut Dice,
) -> Result<Tensor> {
    let shape = shape(spec, load.shapes.get(&spec.name), drawn, dice)?;
    let elements = shape
        .iter()
        .try_fold(1usize, |product, &dim| {
            product.checked_mul(usize::try_from(dim).ok()?)
        })
        .filter(|&elements| elements <= MOST_ELEMENTS)
        .with_context(|| format!("a tensor of shape {shape:?} is too large"))?;
    let range = load.values.get(&spec.name);
    let whole = |dice: &mut Dice, usual: [f64; 2]| {
        let [from, to] = *range.unwrap_or(&usual);
        (from + dice.fraction() * (to - from + 1.0)).floor().min(to)
    };
    let real = |dice: &mut Dice| {
        let [from, to] = *range.unwrap_or(&[0.0, 1.0]);
        from + dice.fraction() * (to - from)
    };
    macro_rules! tensor {
        ($draw:expr) => {{
            let values: Vec<_> = (0..elements).map(|_| $draw).collect();
            Tensor::from_vec(shape, values)
        }};
    }
    // A number beyond the type becomes its nearest one.
    let tensor = match spec.datatype {
        DataType::Bool => tensor!(dice.next() & 1 == 1),
        DataType::Uint8 => tensor!(whole(dice, [0.0, 255.0]) as u8),
        DataType::Int8 => tensor!(whole(dice, [-128.0, 127.0]) as i8),
        DataType::Uint16 => tensor!(whole(dice, [0.0, 255.0]) as u16),
        DataType::Uint32 => tensor!(whole(dice, [0.0, 255.0]) as u32),
        DataType::Uint64 => tensor!(whole(dice, [0.0, 255.0]) as u64),
        DataType::Int16 => tensor!(whole(dice, [0.0, 255.0]) as i16),
        DataType::Int32 => tensor!(whole(dice, [0.0, 255.0]) as i32),
        DataType::Int64 => tensor!(whole(dice, [0.0, 255.0]) as i64),
        DataType::Fp16 => tensor!(f16::from_f64(real(dice))),
        DataType::Bf16 => tensor!(bf16::from_f64(real(dice))),
        DataType::Fp32 => tensor!(real(dice) as f32),
        DataType::Fp64 => tensor!(real(dice)),
        DataType::Bytes => {
            let words: Vec<String> = (0..elements)
                .map(|_| {
                    let length = whole(dice, [8.0, 8.0]) as usize;
                    (0..length)
                        .map(|_| char::from(b'a' + dice.below(26) as u8))
                        .collect()
                })
                .collect();
            Tensor::bytes(shape, words)
        }
    };
    Ok(tensor?)
}

/// The sizes of an input: the model's, and for those it leaves open the scenario's, else 1. Of
/// inputs that nothing is said of, all have one row, so that they agree.
fn shape(
    spec: &InputSpec,
    given: Option<&Vec<Dimension>>,
    drawn: &Drawn<'_>,
    dice: &mut Dice,
) -> Result<Vec<i64>> {
    let Some(given) = given else {
        return Ok(spec
            .shape
            .iter()
            .map(|&dim| if dim < 0 { 1 } else { dim })
            .collect());
    };
    ensure!(
        given.len() == spec.shape.len(),
        "the scenario gives {} dimensions, the model has {:?}",
        given.len(),
        spec.shape
    );
    let mut shape = Vec::with_capacity(given.len());
    for (dimension, &wanted) in given.iter().zip(&spec.shape) {
        let size = dimension.draw(dice, drawn);
        if wanted >= 0 && size != wanted {
            bail!("the scenario gives {size} where the model has {wanted}");
        }
        shape.push(size);
    }
    Ok(shape)
}

fn names(specs: &[InputSpec]) -> String {
    let names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(datatype: DataType, shape: &[i64]) -> InputSpec {
        InputSpec {
            name: "x".to_owned(),
            datatype,
            shape: shape.to_vec(),
        }
    }

    fn random_one(load: &ModelLoad, spec: &InputSpec, dice: &mut Dice) -> Result<Tensor> {
        random(load, spec, &Drawn::new(), dice)
    }

    #[test]
    fn every_datatype_has_random_tensors() {
        let mut dice = Dice::new(1, 0);
        let load = ModelLoad::named("m");
        for datatype in DataType::ALL {
            let tensor = random_one(&load, &spec(datatype, &[-1, 3]), &mut dice).unwrap();
            assert_eq!(tensor.shape(), [1, 3]);
            assert_eq!(tensor.datatype(), datatype);
        }
    }

    #[test]
    fn values_stay_within_their_range_and_reach_its_ends() {
        let mut dice = Dice::new(1, 0);
        let mut load = ModelLoad::named("m");
        load.values.insert("x".to_owned(), [3.0, 5.0]);
        let tensor = random_one(&load, &spec(DataType::Int64, &[1000]), &mut dice).unwrap();
        let mut values = tensor.to_vec::<i64>().unwrap();
        values.sort_unstable();
        values.dedup();
        assert_eq!(values, [3, 4, 5]);
        let tensor = random_one(&load, &spec(DataType::Bytes, &[100]), &mut dice).unwrap();
        let words = tensor.strings().unwrap();
        assert!(words.iter().all(|word| (3..=5).contains(&word.len())));
    }

    #[test]
    fn open_dimensions_follow_the_scenario_and_closed_ones_the_model() {
        let mut dice = Dice::new(1, 0);
        let named = Dimension::Named("L".to_owned());
        let given = vec![Dimension::Fixed(2), Dimension::Range(4, 6), named];
        let drawn = Drawn::from([("L", 7)]);
        let open = spec(DataType::Fp32, &[-1, -1, -1]);
        for _ in 0..20 {
            let shape = shape(&open, Some(&given), &drawn, &mut dice).unwrap();
            assert_eq!((shape[0], shape[2]), (2, 7));
            assert!((4..=6).contains(&shape[1]));
        }
        let check = |wanted: &[i64], words: &str| {
            let mut dice = Dice::new(1, 0);
            let error = shape(
                &spec(DataType::Fp32, wanted),
                Some(&given),
                &drawn,
                &mut dice,
            );
            let error = error.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        check(&[3, -1, -1], "gives 2 where the model has 3");
        check(&[-1, -1, 8], "gives 7 where the model has 8");
        check(&[-1], "gives 3 dimensions");
    }
}
