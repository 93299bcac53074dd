/* Counts the blocks that Python's objects and their parts are given, through the hook of its C API
 * (PyMem_SetAllocator). Free lists are beside that: what comes from one is not counted. */
#include <stddef.h>

typedef struct {
    void *context;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} Allocator; /* PyMemAllocatorEx */

enum { MEM = 1, OBJ = 2 }; /* PyMemAllocatorDomain */

extern void PyMem_GetAllocator(int, Allocator *);
extern void PyMem_SetAllocator(int, Allocator *);

long allocations;
static Allocator inner[3];

static void *counted_malloc(void *context, size_t size)
{
    Allocator *to = context;
    allocations++;
    return to->malloc(to->context, size);
}

static void *counted_calloc(void *context, size_t count, size_t size)
{
    Allocator *to = context;
    allocations++;
    return to->calloc(to->context, count, size);
}

static void *passed_realloc(void *context, void *block, size_t size)
{
    Allocator *to = context;
    return to->realloc(to->context, block, size);
}

static void passed_free(void *context, void *block)
{
    Allocator *to = context;
    to->free(to->context, block);
}

void install(void)
{
    for (int domain = MEM; domain <= OBJ; domain++) {
        Allocator outer = {&inner[domain], counted_malloc, counted_calloc, passed_realloc,
                           passed_free};
        PyMem_GetAllocator(domain, &inner[domain]);
        PyMem_SetAllocator(domain, &outer);
    }
}
