//! Between the wire's types and ours.

use crate::distill::Acceptance;
use crate::distill::trainer::{TrainState, Update};
use crate::distill::{Sample, TopK};
use crate::proto::trainer as wire;

pub fn to_wire(sample: &Sample) -> wire::Sample {
    let teacher = sample
        .teacher
        .iter()
        .map(|top| wire::TopK { ids: top.ids.clone(), logprobs: top.logprobs.clone() });
    wire::Sample {
        id: sample.id,
        prompt_ids: sample.prompt_ids.clone(),
        output_ids: sample.output_ids.clone(),
        temperature: sample.temperature,
        domain: sample.domain.clone(),
        teacher: teacher.collect(),
    }
}

/// What training does not need (time of capture, version, hold-out mark) is not sent.
pub fn from_wire(sample: wire::Sample) -> Sample {
    let teacher =
        sample.teacher.into_iter().map(|top| TopK { ids: top.ids, logprobs: top.logprobs });
    Sample {
        id: sample.id,
        prompt_ids: sample.prompt_ids,
        output_ids: sample.output_ids,
        temperature: sample.temperature,
        domain: sample.domain,
        teacher: teacher.collect(),
        ..Sample::default()
    }
}

pub fn status(state: &TrainState) -> wire::StatusReply {
    wire::StatusReply {
        base: state.base.to_string_lossy().into_owned(),
        step: state.step,
        tokens: state.tokens,
        parameters: state.parameters,
        parameters_without_gradient: state.parameters_without_gradient,
        seconds: state.seconds,
    }
}

pub fn progress(update: Update) -> wire::TrainProgress {
    wire::TrainProgress {
        step: update.step,
        loss: update.loss,
        tokens: update.tokens,
        seconds: update.seconds,
        skipped: update.skipped,
    }
}

pub fn evaluation(acceptance: Acceptance) -> wire::EvaluateReply {
    wire::EvaluateReply {
        positions: acceptance.positions,
        acceptance_rate: acceptance.acceptance_rate,
        mean_accepted_length: acceptance.mean_accepted_length,
        finite: acceptance.finite,
        accepted_per_sample: acceptance.per_sample,
        alpha: acceptance.alpha,
    }
}

pub fn acceptance(reply: wire::EvaluateReply) -> Acceptance {
    Acceptance {
        positions: reply.positions,
        acceptance_rate: reply.acceptance_rate,
        alpha: reply.alpha,
        mean_accepted_length: reply.mean_accepted_length,
        finite: reply.finite,
        per_sample: reply.accepted_per_sample,
    }
}
