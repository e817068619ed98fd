"""Where real kernels differ from fake tensors: aliasing, strides, and temporary allocations.

A simulation sees the values of a captured graph, which are fake. What a real kernel does otherwise is said here, one
kind of difference in each file, and tests run the kernels to check every entry:

=======================  ==========================================================================================
`kernel_results`         whose memory a result shares, and results that take more memory than they have elements
`strides`                results whose strides differ, and the copies that follow from them
`temporaries`            what a composite op allocates beside its result, and allocations that nobody sees: there the
                         simulated memory is a lower bound
`vmap_batches`           whole batches where the graph shows one example
`target_kernels`         what attention and recurrent layers keep on the device that is planned for
=======================  ==========================================================================================
"""
