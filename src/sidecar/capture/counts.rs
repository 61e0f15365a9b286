//! Why exchanges do not become samples.

use std::sync::atomic::{AtomicU64, Ordering};

use super::CaptureObserver;

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Why an exchange did not become a sample.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum DropReason {
            $($(#[$doc])* $variant,)*
        }

        impl DropReason {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The value of the metric's `reason` label.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

drop_reasons! {
    /// The capture task is behind.
    QueueFull = "queue_full",
    /// Bodies under way take all the memory that capture may use.
    Memory = "memory",
    /// Request or answer is over its byte limit.
    TooLarge = "too_large",
    /// Client or upstream broke off, or the answer was complete before the request was.
    Aborted = "aborted",
    /// The answer was not a success.
    ErrorStatus = "error_status",
    /// A stream that did not end with `[DONE]`, or an error inside a stream.
    Incomplete = "incomplete",
    /// A compressed body.
    Encoded = "encoded",
    /// Not the JSON that the API has.
    Malformed = "malformed",
    /// `n`, `best_of` or beam search above one, or several prompts.
    SeveralAnswers = "several_answers",
    /// Tool calls without reported token ids, or with forced ones.
    Tools = "tools",
    /// Images, audio or prompt embeddings.
    Media = "media",
    /// The answer was not sampled from the target's own distribution: biases, allowed tokens,
    /// grammars.
    LogitProcessors = "logit_processors",
    /// For a model that is not the target, such as a LoRA adapter.
    Adapter = "adapter",
    Echo = "echo",
    /// Reasoning output without reported token ids.
    Reasoning = "reasoning",
    /// Template options that only the server can follow, without reported token ids.
    TemplateOptions = "template_options",
    EmptyOutput = "empty_output",
    PromptTooLong = "prompt_too_long",
    OutputTooShort = "output_too_short",
    OutputTooLong = "output_too_long",
    /// Ids were not reported, and there is no tokenizer or template to make them with.
    NoTokenizer = "no_tokenizer",
    /// The template or the tokenizer refused.
    Render = "render",
    /// The ids of the prompt are not as many as the server counted: another template, or a second
    /// BOS.
    PromptMismatch = "prompt_mismatch",
    /// The ids of the answer are not as many as the server counted.
    OutputMismatch = "output_mismatch",
    /// The store refused.
    Store = "store",
    /// A defect of this program.
    Internal = "internal",
}

/// Counts from the request path, reported by the capture task.
#[derive(Debug)]
pub(super) struct Counts {
    dropped: Vec<AtomicU64>,
    opted_out: AtomicU64,
}

impl Default for Counts {
    fn default() -> Self {
        let dropped = DropReason::ALL.iter().map(|_| AtomicU64::new(0)).collect();
        Self { dropped, opted_out: AtomicU64::new(0) }
    }
}

impl Counts {
    pub fn dropped(&self, reason: DropReason) {
        self.dropped[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn opted_out(&self) {
        self.opted_out.fetch_add(1, Ordering::Relaxed);
    }

    /// Passes everything counted since the last call on.
    pub fn report(&self, observer: &dyn CaptureObserver) {
        for _ in 0..self.opted_out.swap(0, Ordering::Relaxed) {
            observer.opted_out();
        }
        for (count, reason) in self.dropped.iter().zip(DropReason::ALL) {
            for _ in 0..count.swap(0, Ordering::Relaxed) {
                observer.dropped(reason.name());
            }
        }
    }
}
