//! (differentiable decoder)
