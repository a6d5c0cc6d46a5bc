"""The routers that led to today's, each a `moe_ref.routing.Router` that the same layer takes.

==================  ==============================================================
`shazeer`           noisy top k, losses of importance and load (2017)
`gshard`            top 2 with a probabilistic second expert, local groups (2020);
                    ST-MoE: top n, threshold, z-loss (2022)
`switch`            top 1 (2021)
`sinkhorn`          choice by optimal transport (S-BASE, 2022)
`mixtral`           softmax over the top k (2024)
`deepseek`          V2, groups of experts (2024); V3, sigmoid and a bias (2024)
==================  ==============================================================

Where libraries differ, the difference is an option with a library's name: `balance` (scale of the
auxiliary loss), `capacity` (rounding, order of dropping), `groups` (how a group of experts scores,
what masks the others), `gshard` (who gets a second expert).

Besides the axes of `moe_ref.routing`, L are local groups of tokens, whose capacity is counted
apart, and N are groups of experts, such as those of one node.
"""
