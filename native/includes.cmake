# Refuses `#include "../`: cmake -DFOLDER=native -P includes.cmake
file(GLOB_RECURSE sources ${FOLDER}/src/*.[ch] ${FOLDER}/measure/*.[ch])
foreach(source ${sources})
  file(STRINGS ${source} found REGEX "^[ \t]*#[ \t]*include[ \t]*[\"<]([^\">]*/)?\\.\\./")
  if(found)
    message(FATAL_ERROR "${source}: ${found}: include a header as folder/name.h")
  endif()
endforeach()
