//! Operators with graphs of their own: branches, loops and scans.

use crate::onnx::Block;

use super::facts::{Fact, Item};
use super::step::{Step, resolve};
use super::{Analysis, Values};

/// Loop-carried values settle within this many rounds: each can only lose what is known of it.
const MAX_ROUNDS: usize = 4;

/// Where among a body's inputs and outputs the values that it hands on to itself start.
#[derive(Clone, Copy)]
struct Carried {
    first_input: usize,
    first_output: usize,
}

/// The iteration's number and the condition come first, the next condition goes out first.
const LOOP: Carried = Carried {
    first_input: 2,
    first_output: 1,
};
const SCAN: Carried = Carried {
    first_input: 0,
    first_output: 0,
};

impl<'a> Analysis<'a> {
    pub(super) fn choice(&mut self, step: &Step<'a, 'a>, values: &mut Values) -> Vec<Fact> {
        if step.inputs.first().is_some_and(Fact::is_rows) {
            let subject = self.subject(step.node);
            self.report(format!("{subject} chooses a branch by values of the batch"));
        }
        let mut joined: Option<Vec<Fact>> = None;
        for branch in ["then_branch", "else_branch"] {
            let Some(block) = step.block(branch) else {
                continue;
            };
            self.block(block, values);
            let facts: Vec<Fact> = block
                .outputs
                .iter()
                .map(|&name| values.fact(name))
                .collect();
            joined = Some(match joined {
                Some(other) => other.iter().zip(&facts).map(|(a, b)| a.or(b)).collect(),
                None => facts,
            });
        }
        joined.unwrap_or_default()
    }

    /// `Loop`: trip count, condition, carried values; its body takes the iteration's number first.
    pub(super) fn repetition(&mut self, step: &Step<'a, 'a>, values: &mut Values) -> Vec<Fact> {
        let subject = self.subject(step.node);
        if step.inputs.iter().take(2).any(Fact::is_rows) {
            self.report(format!(
                "{subject} repeats as often as values of the batch say"
            ));
        }
        let Some(body) = step.block("body") else {
            return vec![Fact::rows(None, None)];
        };
        let carried: Vec<Fact> = step.inputs.iter().skip(2).cloned().collect();
        let mut inputs = vec![Fact::items(vec![Item::Unknown], 0), Fact::fixed(Some(0))];
        inputs.extend(carried.iter().cloned());
        let outputs = self.settle(body, values, inputs, LOOP);
        if outputs.first().is_some_and(Fact::is_rows) {
            self.report(format!("{subject} ends when values of the batch say so"));
        }
        let results = tail(&outputs, LOOP.first_output);
        let (kept, stacked) = results.split_at(carried.len().min(results.len()));
        let kept = kept.iter().cloned();
        kept.chain(stacked.iter().map(|fact| insert(fact, 0)))
            .collect()
    }

    pub(super) fn scan(&mut self, step: &Step<'a, 'a>, values: &mut Values) -> Vec<Fact> {
        let Some(body) = step.block("body") else {
            return vec![Fact::rows(None, None)];
        };
        let scanned = step
            .int("num_scan_inputs")
            .and_then(|count| usize::try_from(count).ok());
        let scanned = scanned.unwrap_or(0).min(step.inputs.len());
        let states = step.inputs.len() - scanned;
        let axes = step.ints("scan_input_axes").unwrap_or_default();
        let mut inputs: Vec<Fact> = step.inputs[..states].to_vec();
        for (index, fact) in step.inputs[states..].iter().enumerate() {
            let axis = resolve(axes.get(index).copied().unwrap_or(0), fact.rank());
            let (fact, through_batch) = remove(fact, axis.unwrap_or(0));
            // Without a state to carry from row to row, each row is on its own.
            if through_batch && states > 0 {
                let subject = self.subject(step.node);
                self.report(format!("{subject} carries a state from row to row"));
            }
            inputs.push(fact);
        }
        let outputs = self.settle(body, values, inputs, SCAN);
        let (kept, stacked) = outputs.split_at(states.min(outputs.len()));
        let axes = step.ints("scan_output_axes").unwrap_or_default();
        let at = |index: usize, fact: &Fact| {
            let rank = fact.rank().map(|rank| rank + 1);
            resolve(axes.get(index).copied().unwrap_or(0), rank).unwrap_or(0)
        };
        let stacked = stacked.iter().enumerate();
        let stacked = stacked.map(|(index, fact)| insert(fact, at(index, fact)));
        kept.iter().cloned().chain(stacked).collect()
    }

    /// Looks at a body until what is known of the values it hands on no longer changes.
    fn settle(
        &mut self,
        body: &'a Block,
        values: &mut Values,
        mut inputs: Vec<Fact>,
        carried: Carried,
    ) -> Vec<Fact> {
        let mut outputs = Vec::new();
        for _ in 0..MAX_ROUNDS {
            for (&(name, rank), fact) in body.inputs.iter().zip(&inputs) {
                let mut fact = fact.clone();
                if let Some(rank) = rank {
                    fact.learn_rank(rank);
                }
                values.set(name, fact);
            }
            self.block(body, values);
            outputs = body.outputs.iter().map(|&name| values.fact(name)).collect();
            let mut changed = false;
            let handed = tail(&outputs, carried.first_output);
            for (input, output) in inputs.iter_mut().skip(carried.first_input).zip(handed) {
                let joined = input.or(output);
                changed |= joined != *input;
                *input = joined;
            }
            if !changed {
                break;
            }
        }
        outputs
    }
}

fn tail(facts: &[Fact], from: usize) -> &[Fact] {
    facts.get(from..).unwrap_or_default()
}

/// A value with one more axis, at `at`.
fn insert(fact: &Fact, at: usize) -> Fact {
    match *fact {
        Fact::Fixed { rank, .. } => Fact::fixed(rank.map(|rank| rank + 1)),
        Fact::Rows { axis, rank } => {
            let shift = |axis| axis + usize::from(at <= axis);
            Fact::rows(axis.map(shift), rank.map(|rank| rank + 1))
        }
    }
}

/// A value without the axis `at`, and whether that was the one that carries the batch.
fn remove(fact: &Fact, at: usize) -> (Fact, bool) {
    match *fact {
        Fact::Fixed { rank, .. } => (
            Fact::fixed(rank.and_then(|rank| rank.checked_sub(1))),
            false,
        ),
        Fact::Rows { axis, rank } => {
            let rank = rank.and_then(|rank| rank.checked_sub(1));
            match axis {
                Some(axis) if axis == at => (Fact::rows(None, rank), true),
                Some(axis) => (Fact::rows(Some(axis - usize::from(at < axis)), rank), false),
                None => (Fact::rows(None, rank), at == 0),
            }
        }
    }
}
